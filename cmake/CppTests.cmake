# bagua_tests: tests/cpp/*.cc on the layers, linked statically so that they see what is not exported.

file(GLOB test_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/cpp/*.cc")
if(NOT test_sources)
  message(STATUS "C++ tests: not built: tests/cpp holds no .cc file")
  return()
endif()
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  message(STATUS "C++ tests: not built: GoogleTest is missing (Debian: apt-get install libgtest-dev)")
  return()
endif()

add_executable(bagua_tests ${test_sources})
target_link_libraries(bagua_tests PRIVATE bagua_c_api bagua_runtime GTest::gtest GTest::gtest_main)
bagua_compile_options(bagua_tests)
include(GoogleTest)
gtest_discover_tests(bagua_tests DISCOVERY_MODE PRE_TEST PROPERTIES TIMEOUT 120)
