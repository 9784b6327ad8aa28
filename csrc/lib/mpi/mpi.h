// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages for MpiWire. They use the MPI library that this process already runs, provided that mpi_abi.h
// describes its ABI. All functions may be called from any thread. On failure, they throw Error(kLibrary) with MPI's
// text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace farandole {

class MpiComm;

struct MpiLibrary {
  std::string file, version;  // version: first line of MPI_Get_library_version, or ""
  const char* abi;  // name of the binary interface, or "" if mpi_abi.h does not describe it
};

// Returns the MPI that this process has initialised, else the first that it has loaded, or nullopt if there is none.
std::optional<MpiLibrary> mpi_of_process();

// A message in flight. The memory of the message must stay valid until test() returns true.
class MpiRequest {
 public:
  MpiRequest() = default;

  explicit operator bool() const { return comm_ != nullptr; }  // true while in flight
  // Returns true once the message is complete, and then empties this object. Throws on failure, and also if a received
  // message has the wrong length.
  bool test();
  // Makes a receive complete soon, perhaps without a message. Has no effect on a send.
  void cancel();

 private:
  friend class MpiComm;
  MpiRequest(MpiComm& comm, int64_t handle, int receives)
      : comm_(&comm), handle_(handle), receives_(receives) {}

  MpiComm* comm_ = nullptr;
  int64_t handle_ = 0;  // int or pointer, depending on the library
  int receives_ = -1;   // number of bytes to receive; -1 for a send or a cancelled receive
};

// A communicator. The caller owns the MPI_Comm, which must outlive this object and its requests.
class MpiComm {
 public:
  // `handle` is the address of an MPI_Comm. Throws if MPI's ABI is unknown or MPI does not provide MPI_THREAD_MULTIPLE.
  static std::unique_ptr<MpiComm> borrow(const void* handle);
  virtual ~MpiComm() = default;

  virtual int largest_tag() = 0;

  // Sends synchronously (MPI_Issend): completes when the receiver has the message, so that none stays in MPI's buffers.
  MpiRequest send(const std::byte* data, int bytes, int to, int tag) {
    return {*this, start_send(data, bytes, to, tag), -1};
  }
  MpiRequest receive(std::byte* data, int bytes, int from, int tag) {
    return {*this, start_receive(data, bytes, from, tag), bytes};
  }

 private:
  friend class MpiRequest;
  virtual int64_t start_send(const std::byte* data, int bytes, int to, int tag) = 0;
  virtual int64_t start_receive(std::byte* data, int bytes, int from, int tag) = 0;
  virtual bool test(int64_t& handle, int receives) = 0;
  virtual void cancel(int64_t handle) = 0;
};

}  // namespace farandole
