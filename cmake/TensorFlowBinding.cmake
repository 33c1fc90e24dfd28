# bagua_ext/libbagua_tensorflow.so: TensorFlow's operations. TensorFlow promises no binary interface
# to kernels in C++, so that the library fits the release that it was built with and no other.
# BAGUA_TENSORFLOW_DIR names the TensorFlow; setup.py gives it.

if(NOT BAGUA_TENSORFLOW_DIR)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/probe_tensorflow.py"
    OUTPUT_VARIABLE probe OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  string(JSON folder ERROR_VARIABLE missing GET "${probe}" folder)
  string(JSON version ERROR_VARIABLE unknown GET "${probe}" version)
  if(missing)
    string(JSON reason GET "${probe}" reason)
    message(STATUS "TensorFlow binding: not built: ${Python3_EXECUTABLE}: ${reason}")
    return()
  endif()
  set(BAGUA_TENSORFLOW_DIR "${folder}" CACHE PATH "Folder of the tensorflow package" FORCE)
  set(BAGUA_TENSORFLOW_VERSION "${version}" CACHE STRING "Its version" FORCE)
endif()

set(tensorflow_library "${BAGUA_TENSORFLOW_DIR}/libtensorflow_framework.so.2")
foreach(file "${tensorflow_library}"
        "${BAGUA_TENSORFLOW_DIR}/include/tensorflow/core/framework/op_kernel.h")
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "TensorFlow binding: ${file} is missing. Install tensorflow 2.16 or newer, "
      "set BAGUA_TENSORFLOW_DIR to its package folder, or turn it off with "
      "-DBAGUA_WITH_TENSORFLOW=OFF")
  endif()
endforeach()
if(NOT BAGUA_TENSORFLOW_VERSION)
  message(FATAL_ERROR "TensorFlow binding: BAGUA_TENSORFLOW_DIR is given without "
    "BAGUA_TENSORFLOW_VERSION, e.g. 2.21.0")
endif()
message(STATUS "TensorFlow binding: for ${BAGUA_TENSORFLOW_VERSION} in ${BAGUA_TENSORFLOW_DIR}")

file(GLOB tensorflow_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tensorflow/*.cc")
add_library(bagua_tensorflow MODULE ${tensorflow_sources})
# TensorFlow's headers are C++17, and what they inline differs from one standard to the next.
set_target_properties(bagua_tensorflow PROPERTIES PREFIX "lib" CXX_STANDARD 17)
target_compile_definitions(bagua_tensorflow PRIVATE EIGEN_MAX_ALIGN_BYTES=64)
# Python reads this from the file before it loads the library into another TensorFlow.
set_property(SOURCE tensorflow/built_for.cc APPEND PROPERTY
  COMPILE_DEFINITIONS "BAGUA_TENSORFLOW_VERSION=\"${BAGUA_TENSORFLOW_VERSION}\"")
target_include_directories(bagua_tensorflow SYSTEM PRIVATE "${BAGUA_TENSORFLOW_DIR}/include")
target_link_libraries(bagua_tensorflow PRIVATE bagua_core "${tensorflow_library}")
bagua_compile_options(bagua_tensorflow)
# Their templates warn where they are used, not only where they stand.
target_compile_options(bagua_tensorflow PRIVATE -Wno-deprecated-declarations -Wno-unused-parameter)
install(TARGETS bagua_tensorflow LIBRARY DESTINATION bagua_ext COMPONENT package)
