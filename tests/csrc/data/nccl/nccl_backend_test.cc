// SPDX-License-Identifier: Apache-2.0
// The NCCL backend over the GPU double: every collective, dtype and operator, and its ways to fail.
#include "data/nccl/nccl_backend.h"

#include "base/error.h"
#include "data/backend/backend_conformance.h"
#include "data/nccl/nccl_members.h"
#include "lib/ipc/event_count.h"

using namespace farandole;
using namespace farandole::check;

namespace {

constexpr std::chrono::seconds kPatience{60};

// One member of a communicator: a thread with a GPU of its own.
class Member {
 public:
  Member(const nccl::UniqueId& id, int member, int members,
         std::chrono::nanoseconds patience = kPatience,
         std::shared_ptr<const nccl::Api> api = gpu_library().nccl)
      : wakeup_(*reinterpret_cast<EventCount*>(segment_.data())),
        device_(GpuDevice::open(gpu_library().cuda, member)),
        mover_(std::make_shared<GpuModule>(device_, *gpu_library().nvrtc)),
        backend_(mover_, {std::move(api), device_, member, members, patience, patience,
                          [this] { wakeup_.notify(); }}) {
    backend_.connect(std::string(id.bytes, sizeof id.bytes));
  }

  GpuBackend& backend() { return backend_; }

  // As the engine does.
  GpuWork launch(std::span<const Part> parts) {
    backend_.begin(parts);
    drive(backend_, wakeup_);
    return backend_.take_work();
  }
  // The results are there on return.
  void run(std::span<const Part> parts) {
    launch(parts).past->wait();
    backend_.finished();
  }
  void run(const BucketSpec& specs, int member, int members) {
    const MemberBucket bucket(specs, member, members);
    run(bucket.parts());
    bucket.check();
  }

 private:
  Segment segment_ = Segment::create("wakeup", sizeof(EventCount), true);
  Wakeup wakeup_;
  std::shared_ptr<GpuDevice> device_;
  GpuMover mover_;
  NcclBackend backend_;
};

void run_all(int members, const std::vector<BucketSpec>& buckets) {
  const nccl::UniqueId id = new_nccl_id();
  in_threads(members, [&](int me) {
    Member member(id, me, members);
    for (const BucketSpec& specs : buckets) member.run(specs, me, members);
  });
  CHECK_EQ(gpu_library().alive(), 0);
}

PartSpec whole(Op op, ReduceOp reduce, DType dtype, int64_t rows) {
  PartSpec spec;
  spec.whole = true;
  spec.part.signature.op = op;
  spec.part.signature.reduce_op = reduce;
  spec.part.signature.dtype = dtype;
  spec.part.signature.shape = {rows};
  spec.seed = static_cast<uint64_t>(rows) * 7919 + static_cast<uint64_t>(dtype) + 1;
  return spec;
}

const BucketSpec kTen = {whole(Op::kAllreduce, ReduceOp::kSum, DType::kFloat32, 10)};

// Every dtype and operator, alone and packed, with and without factors.
std::vector<BucketSpec> buckets_of_all_types(int members) {
  std::vector<BucketSpec> buckets;
  for (int type = 0; type < kDTypeCount; ++type) {
    const auto dtype = static_cast<DType>(type);
    for (ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      if (!kernels::supports(dtype, op) || !traits_of(dtype).reduces_on_gpus()) continue;
      for (double factor : {1.0, 0.5}) {
        if (factor != 1.0 && dtype == DType::kBool) continue;
        BucketSpec bucket;
        for (int64_t rows : {1, 17, 1000}) {
          PartSpec spec = whole(Op::kAllreduce, op, dtype, rows);
          spec.part.signature.prescale = factor;
          spec.part.signature.postscale = 1 / factor;
          spec.part.divisor = op == ReduceOp::kAverage ? members : 1;
          bucket.push_back(spec);
        }
        buckets.push_back({bucket[2]});
        buckets.push_back(std::move(bucket));
      }
    }
  }
  return buckets;
}

}  // namespace

TEST(every_dtype_and_operator_alone_and_packed) {
  for (int members : {1, 2, 3}) run_all(members, buckets_of_all_types(members));
}

TEST(averages_in_place_and_apart) {
  constexpr int kMembers = 3;
  std::vector<BucketSpec> buckets;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kInt32}) {
    for (Op op : {Op::kAllreduce, Op::kReducescatter}) {
      PartSpec spec = whole(op, ReduceOp::kAverage, dtype, 600'000);
      spec.part.divisor = kMembers;
      spec.part.rows = {200'000, 200'000, 200'000};
      for (bool in_place : {false, true}) {
        spec.in_place = in_place;
        buckets.push_back({spec});
      }
    }
  }
  run_all(kMembers, buckets);
}

TEST(an_average_of_float16_does_not_overflow) {
  using Half = reference::SmallFloat<10, -14>;
  constexpr float kValues[] = {30016, 40000, 49984};  // their sum is no float16
  const nccl::UniqueId id = new_nccl_id();
  in_threads(3, [&](int me) {
    Member member(id, me, 3);
    for (int64_t rows : {int64_t{5}, int64_t{1} << 20}) {  // packed alone; where it is
      std::vector<uint16_t> data(static_cast<size_t>(rows), Half::encode(kValues[me]));
      Part part;
      part.signature.dtype = DType::kFloat16;
      part.signature.reduce_op = ReduceOp::kAverage;
      part.signature.shape = {rows};
      part.divisor = 3;
      part.input = part.output = reinterpret_cast<std::byte*>(data.data());
      member.run(std::span(&part, 1));
      CHECK(std::ranges::all_of(data, [](uint16_t bits) { return Half::decode(bits) == 40000; }));
    }
  });
}

TEST(random_buckets_of_all_collectives) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    with_seed(seed, [](uint64_t its) {
      gpu_library().seed(its);
      Random random(its);
      const int members = 1 + static_cast<int>(its % 4);
      std::vector<BucketSpec> buckets;
      for (int i = 0; i < 25; ++i) {
        buckets.push_back(random_bucket(random, members, 8, 70'000));
        std::erase_if(buckets.back(), [](const PartSpec& spec) {
          const Signature& s = spec.part.signature;
          return s.traits().reduces() && !traits_of(s.dtype).reduces_on_gpus();  // refused before
        });
        for (PartSpec& spec : buckets.back()) spec.whole = true;
      }
      run_all(members, buckets);
    });
  }
}

TEST(large_parts_are_reduced_where_they_are) {
  NcclSchedule plan(0, 2);
  std::vector<std::byte> memory(2 * NcclSchedule::kPackedBytes);
  Part part;
  part.signature.shape = {static_cast<int64_t>(memory.size() / sizeof(float))};
  part.input = part.output = memory.data();
  const std::vector<Part> parts(1, part);
  plan.make(parts, 0);
  CHECK(plan.pack.empty() && plan.unpack.empty());
  CHECK_EQ(plan.scratch_bytes(), size_t{0});
  CHECK_EQ(plan.calls.size(), size_t{1});
}

TEST(a_lone_member_gives_up_in_time) {
  Member member(new_nccl_id(), 0, 2, std::chrono::milliseconds(50));
  CHECK_THROWS(member.run(kTen, 0, 2), ErrorCode::kLibrary);
  member.backend().abort();
}

// Its ncclCommAbort would free the communicator under the call.
TEST(an_old_nccl_is_not_aborted_before_its_call_is_back) {
  gpu_library().needs_nccl_double();
  setenv("GPU_DOUBLE_NCCL", "22105", 1);
  const auto old = nccl::open({gpu_library().path});
  // On a busy machine the member may give up before its worker calls NCCL: then it gets more time.
  for (std::chrono::milliseconds timeout(50); gpu_library().alive() == 0; timeout *= 2) {
    Member member(new_nccl_id(), 0, 2, timeout, old);
    CHECK_THROWS(member.run(kTen, 0, 2), ErrorCode::kLibrary);
    member.backend().abort();
  }
  gpu_library().break_rank(0, 6);
  while (gpu_library().alive() > 0) std::this_thread::yield();
  gpu_library().break_rank(0, 0);
  unsetenv("GPU_DOUBLE_NCCL");
}

// NCCL returns the error and a communicator, which is its caller's to abort.
TEST(a_communicator_that_fails_at_once_is_given_back) {
  gpu_library().needs_nccl_double();
  gpu_library().break_rank(0, 6);
  {
    Member member(new_nccl_id(), 0, 2);
    CHECK_THROWS(member.run(kTen, 0, 2), ErrorCode::kLibrary);
    member.backend().abort();
  }
  gpu_library().break_rank(0, 0);
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(an_asynchronous_nccl_error_ends_the_work) {
  gpu_library().needs_nccl_double();
  const nccl::UniqueId id = new_nccl_id();
  in_threads(2, [&](int me) {
    Member member(id, me, 2);
    member.run(kTen, me, 2);
    const MemberBucket bucket(kTen, me, 2);
    if (me == 1) return;  // leaves: member 0's kernel waits for it
    const GpuWork work = member.launch(bucket.parts());
    CHECK(!work.past->fired());
    gpu_library().break_rank(0, 6);
    const Deadline deadline = Deadline::in(kPatience);
    while (!member.backend().failed() && !deadline.expired()) std::this_thread::yield();
    CHECK_THROWS(member.backend().check(), ErrorCode::kLibrary);
    member.backend().abort();
    work.past->wait();
  });
  gpu_library().break_rank(0, 0);
  CHECK_EQ(gpu_library().alive(), 0);
}

TEST(a_failing_launch_is_a_typed_error) {
  gpu_library().needs_nccl_double();
  for (const char* function : {"ncclAllReduce", "ncclGroupEnd"}) {
    Member member(new_nccl_id(), 0, 1);
    member.run(kTen, 0, 1);
    gpu_library().fail(function, 0, 3);
    CHECK_THROWS(member.run(kTen, 0, 1), ErrorCode::kLibrary);
    gpu_library().heal();
    member.backend().abort();
  }
}

TEST(memory_that_is_not_there_is_named_in_bytes) {
  gpu_library().fail("cuMemAllocFromPoolAsync", 0, cuda::kOutOfMemory);
  auto device = GpuDevice::open(gpu_library().cuda, 0);
  const std::string text =
      CHECK_THROWS(device->allocate(12345678, device->stream()), ErrorCode::kLibrary);
  gpu_library().heal();
  CHECK(text.find("12345678 bytes") != std::string::npos);
}
