// SPDX-License-Identifier: Apache-2.0
// What two families of MPI look like in memory, so that one binary serves both and includes neither
// mpi.h. tests/single/test_mpi_abi.py compares every line with both headers.
#pragma once

#include <cstddef>

#include "lib/os/dl.h"

namespace farandole::mpi_abi {

// Alike in both.
constexpr int kSuccess = 0;
constexpr int kThreadMultiple = 3;

struct OpenMpi {
  static constexpr const char* kLibrary = "libmpi.so.40";
  using Comm = void*;
  using Datatype = void*;
  using Errhandler = void*;
  using Request = void*;
  struct Status {
    int source, tag, error, cancelled;
    size_t count;
  };
  static constexpr int kTagUpperBound = 0;     // the key of this attribute
  static constexpr int kErrorTextBytes = 256;  // at most, its terminator included

  // Predefined handles are addresses of objects in the library.
  static constexpr const char* kByte = "ompi_mpi_byte";
  static constexpr const char* kErrorsReturn = "ompi_mpi_errors_return";
  static constexpr const char* kRequestNull = "ompi_request_null";
  static void* predefined(const DynamicLibrary& mpi, const char* object) {
    return mpi.require<void>(object);
  }
};

struct Mpich {
  static constexpr const char* kLibrary = "libmpi.so.12";
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

// The functions that are called, with their prototypes. Named by an enumerator of this table alone.
template <class Abi>
struct Functions {
  using Comm = typename Abi::Comm;
  using Datatype = typename Abi::Datatype;
  using Errhandler = typename Abi::Errhandler;
  using Request = typename Abi::Request;
  using Status = typename Abi::Status;

  int (*initialized)(int* flag);
  int (*finalized)(int* flag);
  int (*query_thread)(int* provided);
  int (*error_string)(int code, char* text, int* length);
  int (*comm_rank)(Comm comm, int* rank);
  int (*comm_size)(Comm comm, int* size);
  int (*comm_get_attr)(Comm comm, int key, void* value, int* flag);
  int (*comm_set_errhandler)(Comm comm, Errhandler handler);
  int (*issend)(const void* data, int count, Datatype type, int to, int tag, Comm comm,
                Request* request);
  int (*irecv)(void* data, int count, Datatype type, int from, int tag, Comm comm,
               Request* request);
  int (*test)(Request* request, int* flag, Status* status);
  int (*get_count)(const Status* status, Datatype type, int* count);
  int (*cancel)(Request* request);
  int (*request_free)(Request* request);
  int (*comm_revoke)(Comm comm);  // nullptr without ULFM

  explicit Functions(const DynamicLibrary& mpi) {
    require(mpi, initialized, "MPI_Initialized");
    require(mpi, finalized, "MPI_Finalized");
    require(mpi, query_thread, "MPI_Query_thread");
    require(mpi, error_string, "MPI_Error_string");
    require(mpi, comm_rank, "MPI_Comm_rank");
    require(mpi, comm_size, "MPI_Comm_size");
    require(mpi, comm_get_attr, "MPI_Comm_get_attr");
    require(mpi, comm_set_errhandler, "MPI_Comm_set_errhandler");
    require(mpi, issend, "MPI_Issend");
    require(mpi, irecv, "MPI_Irecv");
    require(mpi, test, "MPI_Test");
    require(mpi, get_count, "MPI_Get_count");
    require(mpi, cancel, "MPI_Cancel");
    require(mpi, request_free, "MPI_Request_free");
    comm_revoke = mpi.find<int(Comm)>("MPIX_Comm_revoke");
  }

 private:
  template <class Function>
  static void require(const DynamicLibrary& mpi, Function*& function, const char* name) {
    function = mpi.require<Function>(name);
  }
};

}  // namespace farandole::mpi_abi
