# bagua_ext/libbagua_torch.so: PyTorch's operations, in torch's stable ABI, so that one binary serves
# several releases of torch. BAGUA_TORCH_DIR names the torch; setup.py gives it.

if(NOT BAGUA_TORCH_DIR)
  execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/cmake/probe_torch.py"
    OUTPUT_VARIABLE probe OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  string(JSON folder ERROR_VARIABLE missing GET "${probe}" folder)
  if(missing)
    string(JSON reason GET "${probe}" reason)
    message(STATUS "PyTorch binding: not built: ${Python3_EXECUTABLE}: ${reason}")
    return()
  endif()
  set(BAGUA_TORCH_DIR "${folder}" CACHE PATH "Folder of the torch package" FORCE)
endif()

set(torch_library "${BAGUA_TORCH_DIR}/lib/libtorch_cpu.so")
foreach(file "${torch_library}" "${BAGUA_TORCH_DIR}/include/torch/csrc/stable/library.h")
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "PyTorch binding: ${file} is missing. Install torch 2.10 or newer, set "
      "BAGUA_TORCH_DIR to its package folder, or turn it off with -DBAGUA_WITH_TORCH=OFF")
  endif()
endforeach()
message(STATUS "PyTorch binding: for ${BAGUA_TORCH_DIR}")

file(GLOB torch_sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/torch/*.cc")
add_library(bagua_torch MODULE ${torch_sources})
set_target_properties(bagua_torch PROPERTIES PREFIX "lib")
# A source may raise the target when it needs a newer part of the stable ABI.
target_compile_definitions(bagua_torch PRIVATE TORCH_TARGET_VERSION=0x0209000000000000)
target_include_directories(bagua_torch SYSTEM PRIVATE "${BAGUA_TORCH_DIR}/include")
# torch loads its libraries privately, so the operations must name the one that they need.
target_link_libraries(bagua_torch PRIVATE bagua_core "${torch_library}")
target_link_options(bagua_torch PRIVATE "LINKER:--no-as-needed")
bagua_compile_options(bagua_torch)
install(TARGETS bagua_torch LIBRARY DESTINATION bagua_ext COMPONENT package)
