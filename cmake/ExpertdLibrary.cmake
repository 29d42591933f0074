# expertd_library() and expertd_program(): one static library per folder, and the programs.

set_property(GLOBAL PROPERTY EXPERTD_LIBRARIES "")

# expertd_library(NAME FOLDER dir [EXCLUDE file...] [ONLY file...] [PUBLIC_DEPS target...]
#                 [DEPS target...] [COPTS flag...] [GRPC_PCH])
# A static library of dir's own *.cc, without *_test.cc and *_cuda.cc; with CUDA also *.cu and
# *_cuda.cc. PUBLIC_DEPS are those whose headers this folder's headers include. Without sources it
# is an interface library that passes its dependencies on. GRPC_PCH shares one precompiled header.
function(expertd_library name)
  cmake_parse_arguments(arg "GRPC_PCH" "FOLDER" "EXCLUDE;ONLY;PUBLIC_DEPS;DEPS;COPTS" ${ARGN})
  expertd_glob(sources ${arg_FOLDER})
  if(arg_ONLY)
    set(wanted ${arg_ONLY})
    list(TRANSFORM wanted PREPEND "${CMAKE_SOURCE_DIR}/${arg_FOLDER}/")
    set(kept "")
    foreach(source IN LISTS sources)
      if(source IN_LIST wanted)
        list(APPEND kept "${source}")
      endif()
    endforeach()
    set(sources ${kept})
  endif()
  foreach(file IN LISTS arg_EXCLUDE)
    list(REMOVE_ITEM sources "${CMAKE_SOURCE_DIR}/${arg_FOLDER}/${file}")
  endforeach()
  if(NOT sources)
    add_library(${name} INTERFACE)
    target_include_directories(${name} INTERFACE "${CMAKE_SOURCE_DIR}")
    target_link_libraries(${name} INTERFACE ${arg_PUBLIC_DEPS} ${arg_DEPS})
    return()
  endif()
  add_library(${name} STATIC ${sources})
  target_include_directories(${name} PUBLIC "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PUBLIC ${arg_PUBLIC_DEPS} PRIVATE ${arg_DEPS})
  target_link_libraries(${name} PRIVATE $<BUILD_INTERFACE:expertd_warnings>)
  target_compile_options(${name} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:${arg_COPTS}>")
  if(arg_GRPC_PCH)
    expertd_use_grpc_pch(${name})
  endif()
  set_property(GLOBAL APPEND PROPERTY EXPERTD_LIBRARIES ${name})
endfunction()

# expertd_program(NAME MAIN file [FOLDER dir] DEPS target...): an executable at the top of the build
# folder, of MAIN and, with FOLDER, that folder's other sources. Nothing when MAIN does not exist.
function(expertd_program name)
  cmake_parse_arguments(arg "" "MAIN;FOLDER" "DEPS" ${ARGN})
  get_filename_component(folder "${arg_MAIN}" DIRECTORY)
  expertd_glob(all ${folder})  # also makes the build notice when MAIN appears
  if(NOT EXISTS "${CMAKE_SOURCE_DIR}/${arg_MAIN}")
    return()
  endif()
  set(sources "${CMAKE_SOURCE_DIR}/${arg_MAIN}")
  if(arg_FOLDER)
    set(sources ${all})
  endif()
  add_executable(${name} ${sources})
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${arg_DEPS} expertd_warnings)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
endfunction()

# The product sources of one folder (not of its subfolders), as absolute paths.
function(expertd_glob out folder)
  file(GLOB sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/${folder}/*.cc"
    "${CMAKE_SOURCE_DIR}/${folder}/*.cu")
  list(FILTER sources EXCLUDE REGEX "_test\\.(cc|cu)$")
  if(NOT EXPERTD_WITH_CUDA)
    list(FILTER sources EXCLUDE REGEX "(_cuda\\.cc|\\.cu)$")
  endif()
  if(NOT EXPERTD_ONEDNN)
    list(FILTER sources EXCLUDE REGEX "/onednn_[a-z]*\\.cc$")
  endif()
  set(${out} ${sources} PARENT_SCOPE)
endfunction()

# One precompiled header of gRPC, protobuf and the standard library for all who ask for it.
function(expertd_use_grpc_pch target)
  if(NOT TARGET expertd_grpc_pch)
    file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/pch/grpc_pch.cc" CONTENT "// Holds the precompiled header.\n")
    add_library(expertd_grpc_pch OBJECT "${CMAKE_BINARY_DIR}/pch/grpc_pch.cc")
    target_link_libraries(expertd_grpc_pch PRIVATE gRPC::grpc++ protobuf::libprotobuf)
    target_precompile_headers(expertd_grpc_pch PRIVATE <grpcpp/grpcpp.h>
      <google/protobuf/generated_message_reflection.h> <google/protobuf/map.h>
      <google/protobuf/message.h> <google/protobuf/repeated_field.h> <google/protobuf/text_format.h>
      <absl/container/flat_hash_map.h> <absl/status/statusor.h> <absl/strings/str_cat.h>
      <absl/synchronization/mutex.h> <absl/time/time.h> <absl/types/span.h>
      <algorithm> <atomic> <cstdint> <functional> <map> <memory> <optional> <string> <thread>
      <vector>)
  endif()
  target_precompile_headers(${target} REUSE_FROM expertd_grpc_pch)
endfunction()
