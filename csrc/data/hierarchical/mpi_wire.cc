// SPDX-License-Identifier: Apache-2.0
#include "data/hierarchical/mpi_wire.h"

#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace farandole {
namespace {

constexpr std::chrono::milliseconds kPartingTime{50};

}  // namespace

MpiWire::MpiWire(MpiComm& comm, std::vector<Rank> ranks, const std::vector<std::string>& host_names,
                 uint64_t number)
    : comm_(comm),
      ranks_(std::move(ranks)),
      host_names_(host_names),
      first_tag_(static_cast<int>(number % static_cast<uint64_t>(comm.largest_tag() / kChannels)) *
                 kChannels) {}

template <class Start>
Wire::Ticket MpiWire::start(int member, Start&& start) {
  Operation operation{{}, member};
  try {
    if (!fault_.check()) operation.request = start();
  } catch (const Error& error) {
    fail(member, error);
  }
  if (free_.empty()) {
    operations_.push_back(operation);
    return static_cast<Ticket>(operations_.size() - 1);
  }
  const Ticket ticket = free_.back();
  free_.pop_back();
  operations_[static_cast<size_t>(ticket)] = operation;
  return ticket;
}

Wire::Ticket MpiWire::send(int member, Channel channel, const std::byte* data, size_t bytes) {
  const Rank to = ranks_.at(static_cast<size_t>(member));
  return start(member, [&] { return comm_.send(data, static_cast<int>(bytes), to, tag(channel)); });
}

Wire::Ticket MpiWire::receive(int member, Channel channel, std::byte* data, size_t bytes) {
  const Rank from = ranks_.at(static_cast<size_t>(member));
  return start(member,
               [&] { return comm_.receive(data, static_cast<int>(bytes), from, tag(channel)); });
}

bool MpiWire::done(Ticket ticket) {
  if (fault_.check()) return false;
  Operation& operation = operations_[static_cast<size_t>(ticket)];
  try {
    if (!operation.request.test()) return false;
  } catch (const Error& error) {
    fail(operation.member, error);
    return false;
  }
  free_.push_back(ticket);
  return true;
}

// A fault-tolerant MPI reports a lost rank as an error.
void MpiWire::fail(int member, const Error& error) {
  if (error.code() != ErrorCode::kLibrary) throw error;
  const Rank rank = ranks_.at(static_cast<size_t>(member));
  fault_.set(rank, host_names_.at(static_cast<size_t>(rank)), "MPI", error.what());
}

// Cancels receives. A send cannot be cancelled, but completes when the receiver takes the message.
bool MpiWire::abandon() {
  size_t under_way = 0;
  const Deadline deadline = Deadline::in(kPartingTime);
  for (auto& [request, member] : operations_) {
    try {
      if (request) request.cancel();
      while (request && !request.test() && !deadline.expired()) {
      }
    } catch (const Error&) {  // perhaps the peer is dead; the request stays in flight
    }
    under_way += request ? 1 : 0;
  }
  return under_way == 0;
}

}  // namespace farandole
