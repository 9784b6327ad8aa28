// SPDX-License-Identifier: Apache-2.0
#include "data/backend/backend.h"

#include <utility>

namespace farandole {

bool Lane::step() {
  if (buckets_.empty()) return false;
  if (!begun_) {
    if (buckets_.front().begun) buckets_.front().begun();
    backend_->begin(buckets_.front().parts);
    begun_ = true;
  }
  Progress progress = backend_->step();
  if (progress != Progress::kFinished) return progress == Progress::kMoved;
  begun_ = false;
  Bucket finished = std::move(buckets_.front());
  buckets_.pop_front();
  finished.done(nullptr);
  return true;
}

void Lane::abort(const Failure& failure) {
  backend_->abort();
  begun_ = false;
  for (Bucket& bucket : std::exchange(buckets_, {})) bucket.done(&failure);
}

}  // namespace farandole
