# Compiler settings for everything built here: warnings, optimisation, linker, ccache, CUDA.
# Sets EXPERTD_WITH_CUDA; the interface library expertd_warnings carries the warning flags.

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_INCLUDE_CURRENT_DIR OFF)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release or Debug" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g0 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O0 -g1")
set(CMAKE_CXX_FLAGS_MINSIZEREL "-Os -g0 -DNDEBUG -ffunction-sections -fdata-sections")
set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -lineinfo -DNDEBUG")
set(CMAKE_CUDA_FLAGS_DEBUG "-O1 -lineinfo")
set(CMAKE_CUDA_FLAGS_MINSIZEREL "${CMAKE_CUDA_FLAGS_RELEASE}")  # the device is not the place to save

# ccache, told that precompiled headers and __TIME__ do not matter, and to share results between
# build folders and clones.
find_program(EXPERTD_CCACHE ccache)
if(EXPERTD_CCACHE)
  set(launcher env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${EXPERTD_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
endif()

find_program(EXPERTD_LLD ld.lld)
if(EXPERTD_LLD)
  add_link_options($<HOST_LINK:-fuse-ld=lld>)
  add_link_options("$<$<CONFIG:MinSizeRel>:LINKER:--gc-sections;LINKER:--icf=all>")
endif()

if(EXPERTD_SANITIZE)
  string(REPLACE "," ";" sanitizers "${EXPERTD_SANITIZE}")
  foreach(sanitizer IN LISTS sanitizers)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${sanitizer}>)
    add_link_options($<HOST_LINK:-fsanitize=${sanitizer}>)
  endforeach()
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-O1>  # also in Debug: -O0 is too slow here
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>)
endif()

add_library(expertd_warnings INTERFACE)
set(warnings -Wall -Wextra -Werror -Wnon-virtual-dtor -Woverloaded-virtual -Wcast-qual
    -Wno-missing-field-initializers  # designated initialisers leave fields out on purpose
    # False alarms of g++ 12 inside the standard library; the asan preset finds the real ones.
    -Wno-restrict -Wno-maybe-uninitialized -Wno-array-bounds -Wno-stringop-overflow
    -Wno-stringop-overread)
if(EXPERTD_SANITIZE)
  list(APPEND warnings -Wno-error)  # sanitizers confuse the flow-based warnings
endif()
target_compile_options(expertd_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>"
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall> "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Werror all-warnings>")

# CUDA: looked for on PATH and in /usr/local/cuda.
set(EXPERTD_WITH_CUDA OFF)
if(NOT EXPERTD_CUDA STREQUAL "OFF")
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(EXPERTD_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(EXPERTD_NVCC)
      set(CMAKE_CUDA_COMPILER "${EXPERTD_NVCC}")
    endif()
  endif()
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # set by -gencode below
  include(CheckLanguage)
  check_language(CUDA)
  find_path(EXPERTD_NCCL_INCLUDE nccl.h HINTS /usr/local/cuda/include)
  find_library(EXPERTD_NCCL_LIBRARY nccl HINTS /usr/local/cuda/lib64 /usr/local/cuda/lib)
  if(CMAKE_CUDA_COMPILER AND EXPERTD_NCCL_INCLUDE AND EXPERTD_NCCL_LIBRARY)
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know nvcc's flag
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
    find_package(CUDAToolkit REQUIRED)
    add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-gencode=arch=compute_90a,code=sm_90a>"
                        $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>
                        $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)  # a tenth of the bytes
    # The driver is never linked: programs start on machines without one.
    add_library(expertd_cuda_toolkit INTERFACE)
    target_include_directories(expertd_cuda_toolkit SYSTEM INTERFACE ${EXPERTD_NCCL_INCLUDE})
    target_link_libraries(expertd_cuda_toolkit
      INTERFACE CUDA::cudart CUDA::cublasLt ${EXPERTD_NCCL_LIBRARY})
    set(EXPERTD_WITH_CUDA ON)
  elseif(EXPERTD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "EXPERTD_CUDA=ON needs nvcc and NCCL: got nvcc '${CMAKE_CUDA_COMPILER}', "
                        "nccl.h '${EXPERTD_NCCL_INCLUDE}', libnccl '${EXPERTD_NCCL_LIBRARY}'")
  endif()
endif()
message(STATUS "Expertd: ${CMAKE_BUILD_TYPE}, CUDA ${EXPERTD_WITH_CUDA}")
