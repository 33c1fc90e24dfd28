# libbagua_core.so: all layers behind the C API, which is all that it exports.

set(exports "${PROJECT_SOURCE_DIR}/cmake/exports.map")
add_library(bagua_core SHARED)
target_link_libraries(bagua_core PRIVATE bagua_c_api)
target_include_directories(bagua_core INTERFACE "${PROJECT_SOURCE_DIR}")
target_link_options(bagua_core PRIVATE "LINKER:--no-undefined" "LINKER:--version-script=${exports}")
set_target_properties(bagua_core PROPERTIES LINKER_LANGUAGE CXX LINK_DEPENDS "${exports}")
install(TARGETS bagua_core LIBRARY DESTINATION bagua_ext COMPONENT package)
