# expertd_version_definitions(file): tells one source file the version and what it is built from.

function(expertd_version_definitions file)
  set(commit "archive")
  if(EXISTS "${CMAKE_SOURCE_DIR}/.git")
    find_package(Git QUIET)
    if(Git_FOUND)
      execute_process(COMMAND "${GIT_EXECUTABLE}" -C "${CMAKE_SOURCE_DIR}" rev-parse --short=12 HEAD
        OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
    if(EXISTS "${CMAKE_SOURCE_DIR}/.git/logs/HEAD")  # changes with every commit
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/.git/logs/HEAD")
    endif()
  endif()
  set(cuda "no CUDA")
  if(EXPERTD_WITH_CUDA)
    set(cuda "CUDA ${CMAKE_CUDA_COMPILER_VERSION}")
  endif()
  set(build "${commit}, ${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, ${CMAKE_BUILD_TYPE}, ${cuda}")
  set_source_files_properties("${CMAKE_SOURCE_DIR}/${file}" PROPERTIES SKIP_PRECOMPILE_HEADERS ON
    COMPILE_DEFINITIONS "EXPERTD_VERSION=\"${PROJECT_VERSION}\";EXPERTD_BUILD=\"${build}\"")
endfunction()
