// SPDX-License-Identifier: Apache-2.0
// Point-to-point messages for MpiWire. They use the MPI that this process already runs, if mpi_abi.h has the ABI of
// that MPI. Any thread. Throws Error(kLibrary) with MPI's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace farandole {

class MpiComm;

struct MpiLibrary {
  std::string file, version;  // first line of MPI_Get_library_version; may be empty
  const char* abi;            // name of its binary interface; "": not in mpi_abi.h
};

// The MPI that this process has initialised, else the first that it has loaded; nullopt: none.
std::optional<MpiLibrary> mpi_of_process();

// A message in flight. Its memory must stay valid until test() returns true.
class MpiRequest {
 public:
  MpiRequest() = default;

  explicit operator bool() const { return comm_ != nullptr; }  // true: in flight
  // Returns true once the message is complete; this object is then empty. Also throws if a received message has the
  // wrong length.
  bool test();
  // Lets a receive complete soon, perhaps without a message. No effect on a send.
  void cancel();

 private:
  friend class MpiComm;
  MpiRequest(MpiComm& comm, int64_t handle, int receives)
      : comm_(&comm), handle_(handle), receives_(receives) {}

  MpiComm* comm_ = nullptr;
  int64_t handle_ = 0;  // int or pointer, depending on the library
  int receives_ = -1;   // bytes expected; -1: a send, or cancelled
};

// A communicator. The caller owns the MPI_Comm, which must outlive this object and its requests.
class MpiComm {
 public:
  // `handle`: address of an MPI_Comm. Throws if MPI's ABI is unknown or MPI does not provide MPI_THREAD_MULTIPLE.
  static std::unique_ptr<MpiComm> borrow(const void* handle);
  virtual ~MpiComm() = default;

  virtual int largest_tag() = 0;

  // Synchronous (MPI_Issend): completes when the receiver has the message, so no message stays in MPI's buffers.
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
