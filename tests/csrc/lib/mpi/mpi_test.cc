// SPDX-License-Identifier: Apache-2.0
// Messages of a real MPI, by a process that sends to itself. FARANDOLE_TEST_MPI is the library's path.
#include "lib/mpi/mpi.h"

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "data/hierarchical/mpi_wire.h"
#include "lib/mpi/mpi_process.h"

using namespace farandole;
using namespace farandole::check;

namespace {

std::vector<std::byte> bytes_of(size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) {
    bytes[i] = static_cast<std::byte>(i * 131 + static_cast<size_t>(seed) * 29);
  }
  return bytes;
}

void await(MpiRequest& request) {
  const Deadline deadline = Deadline::in(std::chrono::seconds(30));
  while (request && !request.test()) CHECK(!deadline.expired());
}

}  // namespace

TEST(messages_arrive_by_tag_and_in_order) {
  with_mpi([](Started& mpi) {
    const std::unique_ptr<MpiComm> comm = MpiComm::borrow(mpi.self());
    CHECK(comm->largest_tag() >= 32767);
    constexpr int kMany = 20;
    const int tags[] = {0, comm->largest_tag()};
    std::vector<std::vector<std::byte>> sent, received;
    std::vector<MpiRequest> requests;
    for (int i = 0; i < kMany; ++i) {
      const size_t bytes = i == 0 ? 0 : size_t{1} << i;  // eager and by rendezvous
      sent.push_back(bytes_of(bytes, i));
      received.emplace_back(bytes);
    }
    for (int i = 0; i < kMany; ++i) {
      const int size = static_cast<int>(sent[static_cast<size_t>(i)].size());
      requests.push_back(comm->send(sent[static_cast<size_t>(i)].data(), size, 0, tags[i % 2]));
    }
    CHECK(!requests[0].test());  // synchronous: nobody has received it
    for (int parity : {1, 0}) {
      for (int i = parity; i < kMany; i += 2) {
        std::vector<std::byte>& to = received[static_cast<size_t>(i)];
        requests.push_back(comm->receive(to.data(), static_cast<int>(to.size()), 0, tags[parity]));
      }
    }
    for (MpiRequest& request : requests) await(request);
    CHECK(sent == received);
  });
}

TEST(a_message_of_the_wrong_length_is_an_error) {
  with_mpi([](Started& mpi) {
    const std::unique_ptr<MpiComm> comm = MpiComm::borrow(mpi.self());
    std::vector<std::byte> bytes(100);
    const std::vector<std::byte> sent(50);
    MpiRequest receive = comm->receive(bytes.data(), 100, 0, 7);
    comm->send(sent.data(), 50, 0, 7);
    CHECK_THROWS(await(receive), ErrorCode::kInternal);
    MpiRequest shorter = comm->receive(bytes.data(), 10, 0, 7);
    comm->send(sent.data(), 50, 0, 7);
    CHECK_THROWS(await(shorter), ErrorCode::kLibrary);
    CHECK_THROWS(comm->send(sent.data(), 1, 99, 7), ErrorCode::kLibrary);  // no such rank
  });
}

// In a test, a message that is too long stands for a lost rank: MPI fails the receive.
TEST(a_wire_withholds_an_error_of_mpi_then_names_the_rank) {
  with_mpi([](Started& mpi) {
    using Channel = Wire::Channel;
    const std::unique_ptr<MpiComm> comm = MpiComm::borrow(mpi.self());
    const std::vector<std::string> hosts{"this host"};
    MpiWire wire(*comm, {0}, hosts, 3);
    const Deadline deadline = Deadline::in(std::chrono::seconds(30));
    const auto await_all = [&](std::vector<Wire::Ticket> tickets) {
      for (Wire::Ticket ticket : tickets) {
        while (!wire.done(ticket)) CHECK(!deadline.expired());
      }
    };
    const auto partial = bytes_of(50, 1), result = bytes_of(60, 2);
    for (int round = 0; round < 3; ++round) {
      std::vector<std::byte> first(60), second(50);
      await_all({wire.send(0, Channel::kPartial, partial.data(), 50),
                 wire.send(0, Channel::kResult, result.data(), 60),
                 wire.receive(0, Channel::kResult, first.data(), 60),
                 wire.receive(0, Channel::kPartial, second.data(), 50)});
      CHECK(first == result && second == partial);
    }
    std::vector<std::byte> small(10);
    wire.send(0, Channel::kPartial, partial.data(), 50);
    const Wire::Ticket failed = wire.receive(0, Channel::kPartial, small.data(), 10);
    const auto fails = [&](Wire::Ticket ticket) {
      for (;;) {
        CHECK(!wire.done(ticket));
        CHECK(!deadline.expired());
      }
    };
    CHECK(!wire.done(failed));
    const Wire::Ticket later = wire.receive(0, Channel::kResult, small.data(), 10);
    CHECK(contains(CHECK_THROWS(fails(later), ErrorCode::kPeer),
                   "rank 0 on this host can't be reached by MPI any more"));
    CHECK_THROWS(wire.done(failed), ErrorCode::kPeer);
    CHECK(wire.abandon());
  });
}

TEST(a_cancelled_receive_ends) {
  with_mpi([](Started& mpi) {
    const std::unique_ptr<MpiComm> comm = MpiComm::borrow(mpi.self());
    std::byte byte{};
    MpiRequest receive = comm->receive(&byte, 1, 0, 3);
    CHECK(!receive.test());
    receive.cancel();
    await(receive);
    MpiRequest second = comm->receive(&byte, 1, 0, 3);
    const std::byte sent{42};
    MpiRequest send = comm->send(&sent, 1, 0, 3);
    await(second);
    await(send);
    CHECK_EQ(static_cast<int>(byte), 42);
  });
}

TEST(the_library_that_runs_is_known_by_file_version_and_interface) {
  with_mpi([](Started& mpi) {
    const std::optional<MpiLibrary> found = mpi_of_process();
    CHECK(found.has_value());
    const auto name = [](const std::string& path) { return path.substr(path.rfind('/')); };
    CHECK_EQ(name(found->file), name(Started::path()));
    CHECK(!found->version.empty());
    CHECK_EQ(std::string(found->abi), mpi.abi());
  });
}

TEST(fewer_thread_rights_are_refused) {
  with_mpi([](Started& mpi) { CHECK_THROWS(MpiComm::borrow(mpi.self()), ErrorCode::kLibrary); },
           false);
}

TEST(without_mpi_there_is_no_communicator) {
  run_in_fork([] {
    const int handle = 0;
    CHECK_THROWS(MpiComm::borrow(&handle), ErrorCode::kLibrary);
    CHECK(!mpi_of_process());
  });
}
