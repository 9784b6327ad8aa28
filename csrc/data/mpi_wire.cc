// SPDX-License-Identifier: Apache-2.0
#include "data/mpi_wire.h"

#include <utility>

#include "core/error.h"
#include "lib/clock.h"

namespace farandole {
namespace {

constexpr int kChannels = 2;
constexpr std::chrono::milliseconds kPartingTime{50};

}  // namespace

MpiWire::MpiWire(MpiComm& comm, std::vector<Rank> ranks, SetId set)
    : comm_(comm),
      ranks_(std::move(ranks)),
      first_tag_(set % ((comm.largest_tag() + 1) / kChannels) * kChannels) {}

Wire::Ticket MpiWire::keep(MpiRequest request) {
  if (free_.empty()) {
    requests_.push_back(std::move(request));
    return static_cast<Ticket>(requests_.size() - 1);
  }
  const Ticket ticket = free_.back();
  free_.pop_back();
  requests_[static_cast<size_t>(ticket)] = std::move(request);
  return ticket;
}

Wire::Ticket MpiWire::send(int member, Channel channel, const std::byte* data, size_t bytes) {
  const Rank to = ranks_.at(static_cast<size_t>(member));
  return keep(comm_.send(data, static_cast<int>(bytes), to, tag(channel)));
}

Wire::Ticket MpiWire::receive(int member, Channel channel, std::byte* data, size_t bytes) {
  const Rank from = ranks_.at(static_cast<size_t>(member));
  return keep(comm_.receive(data, static_cast<int>(bytes), from, tag(channel)));
}

bool MpiWire::done(Ticket ticket) {
  if (!requests_[static_cast<size_t>(ticket)].test()) return false;
  free_.push_back(ticket);
  return true;
}

// Receives can be called off; a send ends when its receiver takes it, or never.
bool MpiWire::abandon() {
  size_t under_way = 0;
  const Deadline deadline = Deadline::in(kPartingTime);
  for (MpiRequest& request : requests_) {
    try {
      if (request) request.cancel();
      while (request && !request.test() && !deadline.expired()) {
      }
    } catch (const Error&) {  // of a peer that is dead, perhaps: then MPI keeps the request
    }
    under_way += request ? 1 : 0;
  }
  return under_way == 0;
}

}  // namespace farandole
