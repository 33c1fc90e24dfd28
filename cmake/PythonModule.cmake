# bagua_ext/_core.abi3.so: the C API for Python, by cffi's out-of-line API mode on the stable ABI.

find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

set(emitted "${PROJECT_BINARY_DIR}/_core.c")
set(emit_script "${PROJECT_SOURCE_DIR}/cmake/emit_core.py")
set(api_header "${PROJECT_SOURCE_DIR}/common/c_api.h")
add_custom_command(
  OUTPUT "${emitted}"
  COMMAND "${CMAKE_COMMAND}" -E env "PYTHONPATH=${BAGUA_PYTHONPATH}"
          "${Python3_EXECUTABLE}" "${emit_script}" "${api_header}" "${emitted}"
  DEPENDS "${emit_script}" "${api_header}"
  COMMENT "Emitting _core.c from common/c_api.h"
  VERBATIM)

add_library(bagua_core_module MODULE "${emitted}")
target_compile_definitions(bagua_core_module PRIVATE Py_LIMITED_API=0x030A0000)
target_include_directories(bagua_core_module SYSTEM PRIVATE ${Python3_INCLUDE_DIRS})
target_link_libraries(bagua_core_module PRIVATE bagua_core)
set_target_properties(bagua_core_module PROPERTIES
  PREFIX "" OUTPUT_NAME "_core" SUFFIX ".abi3.so")
install(TARGETS bagua_core_module LIBRARY DESTINATION bagua_ext COMPONENT package)
