// SPDX-License-Identifier: Apache-2.0
// A wire that uses MPI.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/types.h"
#include "data/hierarchical/wire.h"
#include "lib/mpi/mpi.h"

namespace farandole {

class MpiWire final : public Wire {
 public:
  // `ranks` are the members' ranks in `comm`. `number` must be unique among open wires; it selects the tags, modulo
  // half of MPI's largest tag. `host_names` is indexed by rank, for error texts. Both references must outlive the wire.
  MpiWire(MpiComm& comm, std::vector<Rank> ranks, const std::vector<std::string>& host_names,
          uint64_t number);

  // MPI sends messages below about 64 KB eagerly. Longer messages use a rendezvous, which waits behind other messages.
  size_t most_bytes() const override { return 48 * 1024; }

  Ticket send(int member, Channel channel, const std::byte* data, size_t bytes) override;
  Ticket receive(int member, Channel channel, std::byte* data, size_t bytes) override;
  void move() override {}  // testing any request moves all messages
  bool done(Ticket ticket) override;
  bool abandon() override;

 private:
  template <class Start>
  Ticket start(int member, Start&& start);
  void fail(int member, const Error& error);
  int tag(Channel channel) const { return first_tag_ + static_cast<int>(channel); }

  MpiComm& comm_;
  const std::vector<Rank> ranks_;  // indexed by member
  const std::vector<std::string>& host_names_;
  const int first_tag_;
  struct Operation {
    MpiRequest request;
    int member;  // the member at the other end
  };
  std::vector<Operation> operations_;  // indexed by ticket
  std::vector<Ticket> free_;
  WireFault fault_;
};

}  // namespace farandole
