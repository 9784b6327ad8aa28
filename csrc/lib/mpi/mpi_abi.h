// SPDX-License-Identifier: Apache-2.0
// The binary interfaces of MPI libraries, so that a single build works with all of them: Open MPI's, MPICH's (which
// Cray, Intel, MVAPICH and ParaStation also use), and the standard ABI of MPI 5.0 (chapter 20). test_mpi_abi.py
// compares them with the libraries' headers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "lib/os/dl.h"

namespace farandole::mpi_abi {

constexpr int kSuccess = 0;  // the same in all libraries

struct OpenMpi {
  static constexpr int kThreadMultiple = 3;
  using Comm = void*;
  using Datatype = void*;
  using Errhandler = void*;
  using Request = void*;
  struct Status {
    int source, tag, error, cancelled;
    size_t count;
  };
  static constexpr int kTagUpperBound = 0;     // the attribute's key
  static constexpr int kErrorTextBytes = 256;  // length of the longest text, with its terminator

  // Predefined handles are the addresses of objects in the library.
  static constexpr const char* kByte = "ompi_mpi_byte";
  static constexpr const char* kErrorsReturn = "ompi_mpi_errors_return";
  static constexpr const char* kRequestNull = "ompi_request_null";
  static void* predefined(const DynamicLibrary& mpi, const char* object) {
    return mpi.require<void>(object);
  }
};

struct Mpich {
  static constexpr int kThreadMultiple = 3;
  using Comm = int;
  using Datatype = int;
  using Errhandler = int;
  using Request = int;
  struct Status {
    int count_low, count_high_and_cancelled, source, tag, error;
  };
  static constexpr int kTagUpperBound = 0x64400001;
  static constexpr int kErrorTextBytes = 512;

  static constexpr int kByte = 0x4c00010d;
  static constexpr int kErrorsReturn = 0x54000001;
  static constexpr int kRequestNull = 0x2c000000;
  static int predefined(const DynamicLibrary&, int handle) { return handle; }
};

struct Standard {
  static constexpr int kThreadMultiple = 4096;
  using Comm = void*;
  using Datatype = void*;
  using Errhandler = void*;
  using Request = void*;
  struct Status {
    int source, tag, error, internal[5];
  };
  static constexpr int kTagUpperBound = 501;
  static constexpr int kErrorTextBytes = 512;

  // Handles are pointers. Predefined handles have small numbers as their values.
  static constexpr int kByte = 0x247;
  static constexpr int kErrorsReturn = 0x143;
  static constexpr int kRequestNull = 0x180;
  static void* predefined(const DynamicLibrary&, int handle) {
    return reinterpret_cast<void*>(static_cast<uintptr_t>(handle));
  }
};

template <class Abi>
struct Functions {
  using Comm = typename Abi::Comm;
  using Datatype = typename Abi::Datatype;
  using Errhandler = typename Abi::Errhandler;
  using Request = typename Abi::Request;
  using Status = typename Abi::Status;

  int (*finalized)(int* flag);
  int (*query_thread)(int* provided);
  int (*error_string)(int code, char* text, int* length);
  int (*comm_get_attr)(Comm comm, int key, void* value, int* flag);
  int (*comm_set_errhandler)(Comm comm, Errhandler handler);
  int (*issend)(const void* data, int count, Datatype type, int to, int tag, Comm comm,
                Request* request);
  int (*irecv)(void* data, int count, Datatype type, int from, int tag, Comm comm,
               Request* request);
  int (*test)(Request* request, int* flag, Status* status);
  int (*get_count)(const Status* status, Datatype type, int* count);
  int (*cancel)(Request* request);

  explicit Functions(const DynamicLibrary& mpi) {
    mpi.fill(finalized, "MPI_Finalized");
    mpi.fill(query_thread, "MPI_Query_thread");
    mpi.fill(error_string, "MPI_Error_string");
    mpi.fill(comm_get_attr, "MPI_Comm_get_attr");
    mpi.fill(comm_set_errhandler, "MPI_Comm_set_errhandler");
    mpi.fill(issend, "MPI_Issend");
    mpi.fill(irecv, "MPI_Irecv");
    mpi.fill(test, "MPI_Test");
    mpi.fill(get_count, "MPI_Get_count");
    mpi.fill(cancel, "MPI_Cancel");
  }
};

}  // namespace farandole::mpi_abi
