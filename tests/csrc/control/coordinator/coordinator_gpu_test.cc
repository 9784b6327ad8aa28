// SPDX-License-Identifier: Apache-2.0
// How a set's tensors on GPUs will travel is decided once, before the first of them; then they have a lane
// of their own.
#include "control/coordinator/coordinator_harness.h"

using namespace farandole;

namespace {

Request on_gpu(std::string name, std::vector<int64_t> shape = {1000}) {
  Request request = tensor(std::move(name), std::move(shape));
  request.signature.device = kAnyGpu;
  return request;
}

// Rank r's own GPU, unless `which` says another.
UseGpu gpu_of(Rank r, std::string library = "NCCL 2.27.5", int which = -1, Rank host = 0) {
  return {"uuid " + std::to_string(which < 0 ? r : which), host, std::move(library),
          "GPU of the test"};
}

bool staged(Job& job) { return only<OpenGpu>(job.publish()).backend == BackendKind::kStaged; }

void use_gpus(Job& job, int ranks) {
  for (Rank r = 0; r < ranks; ++r) job.report(r, gpu_of(r));
}

}  // namespace

TEST(the_first_bucket_on_gpus_opens_the_librarys_backend) {
  Job job(3);
  use_gpus(job, 3);
  job.submit_all(on_gpu("a"));
  Log log = job.publish();
  CHECK_EQ(kinds(log), "open_gpu define run");
  CHECK(only<OpenGpu>(log).backend == BackendKind::kLibrary);
  CHECK(only<OpenGpu>(log).ranks == (std::vector<Rank>{0, 1, 2}));
  CHECK(only<Run>(log).gpu);
  job.report(0, Done{kWorldSet, 1, true});
  job.submit_all(on_gpu("a"));
  CHECK_EQ(kinds(job.publish()), "run");
}

TEST(without_nccl_on_one_rank_all_go_through_host_memory) {
  Job job(2);
  job.report(0, gpu_of(0));
  job.report(1, gpu_of(1, ""));
  job.submit_all(on_gpu("a"));
  CHECK(staged(job));
  CHECK(contains(job.notice(), "no usable NCCL on rank 1"));
}

TEST(two_versions_of_nccl_go_through_host_memory_or_are_an_error) {
  for (const char* backend : {"auto", "nccl"}) {
    Coordinator::Settings settings = Job::settings(2);
    settings.gpu_backend = backend;
    Job job(settings);
    job.report(0, gpu_of(0));
    job.report(1, gpu_of(1, "NCCL 2.18.5"));
    job.submit_all(on_gpu("a"));
    Log log = job.publish();
    if (settings.gpu_backend == "auto") {
      CHECK(only<OpenGpu>(log).backend == BackendKind::kStaged);
      CHECK(contains(job.notice(), "NCCL 2.27.5 on rank 0 and NCCL 2.18.5 on"));
    } else {
      CHECK_EQ(only<Fail>(log).failure.code, ErrorCode::kLibrary);
    }
  }
}

TEST(ranks_of_one_host_on_one_gpu_are_told_how_to_choose) {
  Job job(4);
  for (Rank r = 0; r < 4; ++r) job.report(r, gpu_of(r, "NCCL 2.27.5", r % 2, r / 2 * 2));
  job.submit_all(on_gpu("hosts apart"));
  CHECK(!staged(job));  // 0 and 2 have GPUs of one number on two hosts

  Job crowd(2);
  for (Rank r = 0; r < 2; ++r) crowd.report(r, gpu_of(r, "NCCL 2.27.5", 0));
  crowd.submit_all(on_gpu("a"));
  const Failure failure = only<Fail>(crowd.publish()).failure;
  CHECK(contains(failure.text, "ranks 0 and 1 both use GPU of the test"));
  for (Rank r = 0; r < 2; ++r) crowd.report(r, gpu_of(r));  // each has chosen its own now
  crowd.submit_all(on_gpu("a"));
  CHECK(!staged(crowd));
}

TEST(a_rank_that_joined_without_a_gpu_can_not_take_part) {
  Job job(2);
  job.report(0, gpu_of(0));
  job.report(1, Join{kWorldSet});
  job.submit(0, on_gpu("a"));
  CHECK(contains(only<Fail>(job.publish()).failure.text, "rank 1 joined"));
}

TEST(neither_kind_of_memory_waits_for_the_other) {
  Job job(2);
  use_gpus(job, 2);
  for (int i = 0; i < 3; ++i) job.submit_all(on_gpu("gpu " + std::to_string(i), {64 << 20}));
  for (int i = 0; i < 3; ++i) job.submit_all(tensor("cpu " + std::to_string(i), {64 << 20}));
  const std::vector<Run> runs = all<Run>(job.publish());  // two of each may be outstanding
  CHECK_EQ(runs.size(), size_t{4});
  CHECK(!runs[0].gpu && !runs[1].gpu && runs[2].gpu && runs[3].gpu);
  CHECK_EQ(runs[3].bucket, uint64_t{2});
  job.report(0, Done{kWorldSet, 1, true});
  CHECK(only<Run>(job.publish()).gpu);
}

TEST(the_key_of_the_lowest_member_reaches_all) {
  Job job(3);
  use_gpus(job, 3);
  job.report(0, OpenGpu{kWorldSet, "before the set is open"});
  job.submit_all(on_gpu("a"));
  CHECK_EQ(only<OpenGpu>(job.publish()).key, "");
  job.report(1, OpenGpu{kWorldSet, "of another member"});
  CHECK(job.publish().empty());
  job.report(0, OpenGpu{kWorldSet, "the key"});
  CHECK_EQ(only<OpenGpu>(job.publish()).key, "the key");
}
