# expertd_all_tests(): one GoogleTest binary per folder of tests/, Python tests, the link tests.
#
# tests/<dir>/*_test.cc        -> <build>/tests/<dir_with_underscores>_test
# tests/<dir>/*_gpu_test.{cc,cu}      -> ..._gpu_test, also labelled gpu; built only with CUDA
# tests/<dir>/*_multigpu_test.{cc,cu} -> ..._multigpu_test, also labelled multigpu; likewise
# tests/fuzz/*_fuzz.cc         -> linked into the fuzz_test binary; run.sh there builds them alone
# tests/**/*_test.py           -> one test per file, run with pytest
# Labels: the first folder's name for those listed in EXPERTD_TEST_LABELS, `unit` for all others.

set(EXPERTD_TEST_LABELS conformance integration abuse model fuzz fault)

# Folders whose binaries link less than everything, so that they build fast.
set(EXPERTD_TEST_DEPS_base expertd_base)
set(EXPERTD_TEST_DEPS_reference expertd_reference)
set(EXPERTD_TEST_DEPS_kernels expertd_kernels expertd_kernels_cpu expertd_kernels_router
  expertd_kernels_ep expertd_kernels_mlp expertd_kernels_optim expertd_reference)
set(EXPERTD_TEST_DEPS_model expertd_server_engine)
set(EXPERTD_TEST_DEPS_fuzz expertd_server expertd_server_rpc expertd_server_engine expertd_proto)
set(EXPERTD_TEST_DEPS_client expertd_client expertd_train expertd_expertctl)
set(EXPERTD_TEST_DEPS_other expertd_testing expertd_train expertd_expertctl)

function(expertd_all_tests)
  find_package(GTest REQUIRED)
  include(GoogleTest)
  file(GLOB_RECURSE files RELATIVE "${CMAKE_SOURCE_DIR}/tests" CONFIGURE_DEPENDS
    "${CMAKE_SOURCE_DIR}/tests/*_test.cc" "${CMAKE_SOURCE_DIR}/tests/*_test.cu"
    "${CMAKE_SOURCE_DIR}/tests/*_test.py")
  list(SORT files)
  set(binaries "")
  foreach(file IN LISTS files)
    get_filename_component(folder "${file}" DIRECTORY)
    if(file MATCHES "\\.py$")
      expertd_python_test("${file}")
      continue()
    endif()
    string(REGEX MATCH "(_multigpu|_gpu|)_test\\.c[cu]$" suffix "${file}")
    string(REGEX REPLACE "\\.c[cu]$" "" suffix "${suffix}")
    if(NOT EXPERTD_WITH_CUDA AND (suffix MATCHES "gpu" OR file MATCHES "\\.cu$"))
      continue()
    endif()
    string(REPLACE "/" "_" binary "${folder}${suffix}")
    list(APPEND binaries ${binary})
    set(folder_of_${binary} "${folder}")
    list(APPEND sources_of_${binary} "${CMAKE_SOURCE_DIR}/tests/${file}")
  endforeach()
  list(REMOVE_DUPLICATES binaries)
  # Entry points of fuzzers, each under a name of its own in the folder's test binary.
  file(GLOB fuzzers CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/fuzz/*_fuzz.cc")
  foreach(fuzzer IN LISTS fuzzers)
    get_filename_component(name "${fuzzer}" NAME_WE)
    set_source_files_properties("${fuzzer}" PROPERTIES
      COMPILE_DEFINITIONS "LLVMFuzzerTestOneInput=Run_${name}")
    list(APPEND sources_of_fuzz_test "${fuzzer}")
  endforeach()
  foreach(binary IN LISTS binaries)
    expertd_test_binary(${binary} "${folder_of_${binary}}" ${sources_of_${binary}})
  endforeach()
  expertd_gpu_service_tests()
  expertd_link_tests()
  expertd_tree_checks()
endfunction()

# The labels of a test in `folder` whose binary or file is called `name`.
function(expertd_labels out folder name)
  string(REGEX REPLACE "/.*" "" top "${folder}")
  set(labels unit)
  if(top IN_LIST EXPERTD_TEST_LABELS)
    set(labels ${top})
  endif()
  if(name MATCHES "_multigpu_test")
    list(APPEND labels multigpu)
  elseif(name MATCHES "_gpu_test")
    list(APPEND labels gpu)
  endif()
  set(${out} "${labels}" PARENT_SCOPE)
endfunction()

# Environment of every test: where the programs are, and what the sanitizers should pass over.
function(expertd_test_environment out)
  set(model_states "")
  if(EXPERTD_SANITIZE)
    set(model_states "EXPERTD_MODEL_STATES=200000")  # every state takes long there
  endif()
  set(${out} "EXPERTD_BIN_DIR=${CMAKE_BINARY_DIR}" "EXPERTD_SOURCE_DIR=${CMAKE_SOURCE_DIR}"
    "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/tsan.supp second_deadlock_stack=1"
    "LSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/lsan.supp print_suppressions=0"
    "UBSAN_OPTIONS=print_stacktrace=1" ${model_states} PARENT_SCOPE)
endfunction()

# Seconds a single test may take.
function(expertd_test_timeout out labels)
  set(${out} 60 PARENT_SCOPE)
  if(NOT "unit" IN_LIST labels)
    set(${out} 180 PARENT_SCOPE)
  endif()
endfunction()

function(expertd_test_binary name folder)
  string(REGEX REPLACE "/.*" "" top "${folder}")
  set(deps ${EXPERTD_TEST_DEPS_other})
  if(DEFINED EXPERTD_TEST_DEPS_${top})
    set(deps ${EXPERTD_TEST_DEPS_${top}})
  endif()
  add_executable(${name} ${ARGN})
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE ${deps} ${cuda_deps} GTest::gtest GTest::gmock GTest::gtest_main
    expertd_warnings)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX
    RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
  if("expertd_testing" IN_LIST deps OR top STREQUAL "client")
    expertd_use_grpc_pch(${name})
  endif()
  foreach(program IN ITEMS expertd expertctl)
    if(TARGET ${program} AND "expertd_testing" IN_LIST deps)
      add_dependencies(${name} ${program})  # tests may start the programs
    endif()
  endforeach()
  expertd_labels(labels "${folder}" ${name})
  expertd_test_timeout(timeout "${labels}")
  expertd_test_environment(environment)
  string(REGEX REPLACE "_test$" "" prefix ${name})
  gtest_discover_tests(${name} TEST_PREFIX "${prefix}." TEST_LIST ${name}_cases DISCOVERY_TIMEOUT 60)
  # Properties that are lists do not survive gtest_discover_tests: ctest reads them from here.
  set(properties "${CMAKE_BINARY_DIR}/tests/${name}_properties.cmake")
  file(CONFIGURE OUTPUT "${properties}" @ONLY CONTENT [[
if(@name@_cases)
  set_tests_properties(${@name@_cases} PROPERTIES LABELS "@labels@" TIMEOUT @timeout@
    ENVIRONMENT "@environment@")
endif()
]])
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES "${properties}")
endfunction()

function(expertd_python_test file)
  get_filename_component(folder "${file}" DIRECTORY)
  string(REGEX REPLACE "\\.py$" "" name "${file}")
  string(REPLACE "/" "." name "${name}")
  expertd_labels(labels "${folder}" "${file}")
  expertd_test_timeout(timeout "${labels}")
  expertd_test_environment(environment)
  list(APPEND environment "PYTHONDONTWRITEBYTECODE=1"
    "PYTHONPATH=${CMAKE_SOURCE_DIR}/client/python:${CMAKE_BINARY_DIR}/python:${CMAKE_SOURCE_DIR}")
  add_test(NAME ${name} WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
    COMMAND "${EXPERTD_PYTHON}" -m pytest -q -rs -p no:cacheprovider "tests/${file}")
  set_tests_properties(${name} PROPERTIES LABELS "${labels}" TIMEOUT ${timeout}
    ENVIRONMENT "${environment}" SKIP_REGULAR_EXPRESSION "\n[0-9]+ skipped in ")
endfunction()

# The service's conformance suite once more, whole, with its daemons on GPUs.
function(expertd_gpu_service_tests)
  if(NOT EXPERTD_WITH_CUDA OR NOT TARGET conformance_service_test)
    return()
  endif()
  expertd_test_environment(environment)
  foreach(shape IN ITEMS nccl_1 nccl_2 nccl_network_2)
    set(label gpu)
    if(NOT shape MATCHES "_1$")
      set(label multigpu)
    endif()
    add_test(NAME conformance_service.${shape} COMMAND conformance_service_test --gtest_brief=1)
    set_tests_properties(conformance_service.${shape} PROPERTIES LABELS "conformance;${label}"
      TIMEOUT 600 ENVIRONMENT "${environment};EXPERTD_TEST_SHAPES=${shape}")
  endforeach()
endfunction()

# Links each library whole, with nothing but its declared dependencies: a symbol that only a library
# it must not use could give stays unresolved and fails the build.
function(expertd_link_tests)
  get_property(libraries GLOBAL PROPERTY EXPERTD_LIBRARIES)
  set(main "${CMAKE_BINARY_DIR}/link_test_main.cc")
  file(GENERATE OUTPUT "${main}" CONTENT "// Links one library whole; running it proves nothing more.\nint main() { return 0; }\n")
  foreach(library IN LISTS libraries)
    string(REGEX REPLACE "^expertd_" "link_" test ${library})
    add_executable(${test} "${main}")
    target_link_libraries(${test} PRIVATE "$<LINK_LIBRARY:WHOLE_ARCHIVE,${library}>")
    set_target_properties(${test} PROPERTIES LINKER_LANGUAGE CXX
      RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/tests")
    add_test(NAME layering.${test} COMMAND ${test})
    set_tests_properties(layering.${test} PROPERTIES LABELS unit TIMEOUT 60)
  endforeach()
endfunction()

# Checks of the source tree itself.
function(expertd_tree_checks)
  if(EXISTS "${CMAKE_SOURCE_DIR}/tests/layering/include_check.py")
    add_test(NAME layering.include_check WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}"
      COMMAND "${EXPERTD_PYTHON}" tests/layering/include_check.py "${CMAKE_SOURCE_DIR}")
    set_tests_properties(layering.include_check PROPERTIES LABELS unit TIMEOUT 60)
  endif()
  if(EXISTS "${CMAKE_SOURCE_DIR}/dev")
    add_test(NAME layering.format_check COMMAND "${CMAKE_SOURCE_DIR}/dev" format --check)
    set_tests_properties(layering.format_check PROPERTIES LABELS unit TIMEOUT 120)
  endif()
endfunction()
