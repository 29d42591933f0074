# expertd_proto_library(): C++ and Python code generated from the .proto files.
#
# C++ headers are included as "expertd/v1/types.pb.h", from <build>/gen. Python modules are imported
# as expertd.v1.types_pb2, from <build>/python. google/rpc/{status,code,error_details}.proto come from
# EXPERTD_GOOGLEAPIS_DIR and are generated into the same C++ folder.

function(expertd_proto_library name)
  cmake_parse_arguments(arg "" "FOLDER" "" ${ARGN})
  foreach(file IN ITEMS status code error_details)
    if(NOT EXISTS "${EXPERTD_GOOGLEAPIS_DIR}/google/rpc/${file}.proto")
      message(FATAL_ERROR "google/rpc/${file}.proto is missing in ${EXPERTD_GOOGLEAPIS_DIR}: "
                          "run ./dev deps, or set EXPERTD_GOOGLEAPIS_DIR")
    endif()
  endforeach()
  set(gen "${CMAKE_BINARY_DIR}/gen")
  file(MAKE_DIRECTORY "${gen}")
  file(GLOB protos RELATIVE "${CMAKE_SOURCE_DIR}/proto" CONFIGURE_DEPENDS
    "${CMAKE_SOURCE_DIR}/${arg_FOLDER}/*.proto")
  set(imports -I "${CMAKE_SOURCE_DIR}/proto" -I "${EXPERTD_GOOGLEAPIS_DIR}")
  set(sources "")
  set(python "")
  get_target_property(plugin gRPC::grpc_cpp_plugin LOCATION)
  foreach(proto IN ITEMS google/rpc/status.proto google/rpc/code.proto google/rpc/error_details.proto
                         LISTS protos)
    string(REGEX REPLACE "\\.proto$" "" stem "${proto}")
    set(root "${CMAKE_SOURCE_DIR}/proto")
    if(proto MATCHES "^google/")
      set(root "${EXPERTD_GOOGLEAPIS_DIR}")
    endif()
    set(services_out "")
    set(outputs "${gen}/${stem}.pb.cc" "${gen}/${stem}.pb.h")
    if(NOT proto MATCHES "^google/")
      list(APPEND outputs "${gen}/${stem}.grpc.pb.cc" "${gen}/${stem}.grpc.pb.h")
      set(services_out "--grpc_out=${gen}" "--plugin=protoc-gen-grpc=${plugin}")
      string(REGEX REPLACE "\\.proto$" "_pb2.py" py "${CMAKE_BINARY_DIR}/python/${proto}")
      list(APPEND python "${py}")
    endif()
    # A change in any .proto regenerates all: they import each other and generation is quick.
    set(inputs ${protos})
    list(TRANSFORM inputs PREPEND "${CMAKE_SOURCE_DIR}/proto/")
    add_custom_command(OUTPUT ${outputs}
      COMMAND protobuf::protoc ${imports} "--cpp_out=${gen}" ${services_out} "${root}/${proto}"
      DEPENDS "${root}/${proto}" ${inputs}
      COMMENT "Generating ${stem}.pb.cc" VERBATIM)
    list(APPEND sources ${outputs})
  endforeach()
  add_library(${name} STATIC ${sources})
  target_include_directories(${name} SYSTEM PUBLIC "${gen}")
  target_compile_options(${name} PRIVATE -w)
  target_link_libraries(${name} PUBLIC gRPC::grpc++ protobuf::libprotobuf absl::span absl::status absl::time)
  expertd_use_grpc_pch(${name})
  set_property(GLOBAL APPEND PROPERTY EXPERTD_LIBRARIES ${name})
  add_custom_target(${name}_headers DEPENDS ${sources})  # what a linter needs

  if(python AND EXISTS "${EXPERTD_PYTHON}")
    list(TRANSFORM protos PREPEND "${CMAKE_SOURCE_DIR}/proto/" OUTPUT_VARIABLE inputs)
    add_custom_command(OUTPUT ${python}
      COMMAND ${CMAKE_COMMAND} -E make_directory "${CMAKE_BINARY_DIR}/python"
      COMMAND "${EXPERTD_PYTHON}" -m grpc_tools.protoc ${imports}
        "--python_out=${CMAKE_BINARY_DIR}/python" "--grpc_python_out=${CMAKE_BINARY_DIR}/python" ${inputs}
      DEPENDS ${inputs} COMMENT "Generating Python modules" VERBATIM)
    add_custom_target(${name}_python ALL DEPENDS ${python})
  endif()
endfunction()
