// SPDX-License-Identifier: Apache-2.0
#include "lib/ipc/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>

#include "check.h"
#include "lib/os/memory.h"

namespace farandole {
namespace {

constexpr size_t kBytes = 3 * 4096 + 5;

Fd copy_of(const Segment& segment) { return Fd(fcntl(segment.fd(), F_DUPFD_CLOEXEC, 0)); }

bool is_mapped(const void* address) {
  unsigned char resident = 0;
  return mincore(const_cast<void*>(address), 1, &resident) == 0;
}

}  // namespace

TEST(a_new_segment_is_zeroed_and_writable) {
  const Segment segment = Segment::create("fresh", kBytes);
  CHECK(segment.data() != nullptr);
  CHECK_EQ(segment.size(), kBytes);
  for (size_t i = 0; i < kBytes; ++i) CHECK(segment.data()[i] == std::byte{0});
  std::memset(segment.data(), 0x5a, kBytes);
  CHECK(segment.data()[kBytes - 1] == std::byte{0x5a});
}

TEST(who_maps_the_descriptor_shares_the_memory) {
  const Segment one = Segment::create("shared", kBytes);
  const Segment two = Segment::map(copy_of(one));
  CHECK_EQ(two.size(), kBytes);
  CHECK(one.data() != two.data());
  one.data()[4099] = std::byte{11};
  CHECK(two.data()[4099] == std::byte{11});
}

TEST(the_size_is_fixed_for_good) {
  const Segment segment = Segment::create("sealed", kBytes);
  CHECK_EQ(ftruncate(segment.fd(), 4096), -1);
  CHECK_EQ(ftruncate(segment.fd(), 1 << 20), -1);
  CHECK_EQ(fcntl(segment.fd(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE), -1);
}

TEST(a_descriptor_that_may_shrink_is_refused) {
  Fd loose(memfd_create("loose", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK_EQ(ftruncate(loose.get(), 4096), 0);
  CHECK_THROWS(Segment::map(std::move(loose)), ErrorCode::kInternal);
  int ends[2];
  CHECK_EQ(pipe2(ends, O_CLOEXEC), 0);
  const Fd writing(ends[1]);
  CHECK_THROWS(Segment::map(Fd(ends[0])), ErrorCode::kLibrary);
}

TEST(too_much_memory_is_an_error_that_tells_bytes_and_remedy) {
  constexpr size_t kTooMuch = size_t{1} << 60;
  const std::string text = CHECK_THROWS(Segment::create("huge", kTooMuch), ErrorCode::kLibrary);
  CHECK(text.find(std::to_string(kTooMuch)) != std::string::npos);
  CHECK(text.find("/dev/shm") != std::string::npos);
  CHECK_THROWS(Segment::create("more than there is", available_memory() * 2), ErrorCode::kLibrary);
  CHECK_THROWS(Segment::create("nothing", 0), ErrorCode::kInternal);
}

TEST(a_forked_child_has_the_mapping_only_if_asked) {
  const Segment own = Segment::create("own", kBytes);
  const Segment common = Segment::create("common", kBytes, true);
  check::run_in_fork([&] {
    CHECK(!is_mapped(own.data()));
    CHECK(is_mapped(common.data()));
    common.data()[0] = std::byte{3};
  });
  CHECK(is_mapped(own.data()));
  CHECK(common.data()[0] == std::byte{3});
}

TEST(moving_hands_over_and_destruction_unmaps) {
  const std::byte* address = nullptr;
  int fd = -1;
  {
    Segment first = Segment::create("moved", kBytes);
    address = first.data();
    Segment second = std::move(first);
    CHECK(first.data() == nullptr);
    CHECK(second.data() == address);
    first = std::move(second);
    CHECK(first.data() == address);
    fd = first.fd();
    CHECK(is_mapped(address));
  }
  CHECK(!is_mapped(address));
  CHECK_EQ(fcntl(fd, F_GETFD), -1);
}

TEST(available_memory_is_less_than_all_and_more_than_nothing) {
  const auto all = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * 4096;
  CHECK(available_memory() < all);
  CHECK(available_memory() > size_t{16} << 20);
}

TEST(the_label_shows_in_the_map_of_the_process) {
  const Segment segment = Segment::create("farandole-label", kBytes);
  std::ifstream maps("/proc/self/maps");
  const std::string text(std::istreambuf_iterator<char>(maps), {});
  CHECK(text.find("memfd:farandole-label") != std::string::npos);
  CHECK((fcntl(segment.fd(), F_GETFD) & FD_CLOEXEC) != 0);
}

}  // namespace farandole
