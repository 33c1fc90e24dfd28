# bagua_layer(NAME USES LAYER...): the target bagua_NAME from common/NAME/*.cc.
#
# A layer of headers alone, or of nothing yet, is an INTERFACE target, so that others can name it.
# The border, c_api, is the files directly in common/ and those in common/c_api/; it is an OBJECT
# target, since nothing in libbagua_core calls it and the linker would leave it out of a static
# library.

function(bagua_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 layer "" "" "USES")
  set(used ${layer_USES})
  list(TRANSFORM used PREPEND bagua_)
  set(kind STATIC)
  if(name STREQUAL "c_api")
    set(kind OBJECT)
    file(GLOB sources CONFIGURE_DEPENDS
      "${PROJECT_SOURCE_DIR}/common/*.cc" "${PROJECT_SOURCE_DIR}/common/c_api/*.cc")
  else()
    file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/common/${name}/*.cc")
  endif()
  if(NOT sources)
    add_library(bagua_${name} INTERFACE)
    target_link_libraries(bagua_${name} INTERFACE ${used})
    return()
  endif()
  add_library(bagua_${name} ${kind} ${sources})
  target_include_directories(bagua_${name} PUBLIC "${PROJECT_SOURCE_DIR}")
  target_link_libraries(bagua_${name} PUBLIC ${used} Threads::Threads)
  bagua_compile_options(bagua_${name})
endfunction()
