# bagua_ext/libbagua_tensorflow.so: TensorFlow's operations. TensorFlow promises no binary interface
# to kernels in C++, so that the library fits the release that it was built with and no other.
# BAGUA_TENSORFLOW_DIR names the TensorFlow; setup.py gives it.

# Found anew each time unless it is given: the package may have been replaced in place.
set(tensorflow_dir "${BAGUA_TENSORFLOW_DIR}")
set(tensorflow_version "${BAGUA_TENSORFLOW_VERSION}")
if(NOT tensorflow_dir)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/probe_tensorflow.py"
    OUTPUT_VARIABLE probe OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  string(JSON reason ERROR_VARIABLE found GET "${probe}" reason)
  if(NOT found)
    message(STATUS "TensorFlow binding: not built: ${Python3_EXECUTABLE}: ${reason}")
    return()
  endif()
  string(JSON tensorflow_dir GET "${probe}" folder)
  string(JSON tensorflow_version GET "${probe}" version)
endif()

set(tensorflow_library "${tensorflow_dir}/libtensorflow_framework.so.2")
foreach(file "${tensorflow_library}"
        "${tensorflow_dir}/include/tensorflow/core/framework/op_kernel.h")
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "TensorFlow binding: ${file} is missing. Install tensorflow 2.16 or newer, "
      "set BAGUA_TENSORFLOW_DIR to its package folder, or turn it off with "
      "-DBAGUA_WITH_TENSORFLOW=OFF")
  endif()
endforeach()
if(NOT tensorflow_version)
  message(FATAL_ERROR "TensorFlow binding: BAGUA_TENSORFLOW_DIR is given without "
    "BAGUA_TENSORFLOW_VERSION, e.g. 2.21.0")
endif()
message(STATUS "TensorFlow binding: for ${tensorflow_version} in ${tensorflow_dir}")

file(GLOB tensorflow_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tensorflow/*.cc")
add_library(bagua_tensorflow MODULE ${tensorflow_sources})
# TensorFlow's headers are C++17, and what they inline differs from one standard to the next.
set_target_properties(bagua_tensorflow PROPERTIES PREFIX "lib" CXX_STANDARD 17)
target_compile_definitions(bagua_tensorflow PRIVATE EIGEN_MAX_ALIGN_BYTES=64)
# Python reads this from the file before it loads the library into another TensorFlow.
set_property(SOURCE tensorflow/built_for.cc APPEND PROPERTY
  COMPILE_DEFINITIONS "BAGUA_TENSORFLOW_VERSION=\"${tensorflow_version}\"")
target_include_directories(bagua_tensorflow SYSTEM PRIVATE "${tensorflow_dir}/include")
target_link_libraries(bagua_tensorflow PRIVATE bagua_core "${tensorflow_library}")
bagua_compile_options(bagua_tensorflow)
# Their templates warn where they are used, not only where they stand.
target_compile_options(bagua_tensorflow PRIVATE -Wno-deprecated-declarations -Wno-unused-parameter)
install(TARGETS bagua_tensorflow LIBRARY DESTINATION bagua_ext COMPONENT package)
