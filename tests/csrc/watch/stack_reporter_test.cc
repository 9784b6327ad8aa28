// SPDX-License-Identifier: Apache-2.0
#include "watch/stack_reporter.h"

#include "check.h"

namespace farandole {
namespace {

const std::string kSource = R"(def train():
    for epoch in range(3):
        while more():
            step(
                batch,
            )
            if last:
                log()
        # no statement: for x in y
        evaluate()
    else:
        save()
    report()
    def helper():
        go()
for job in jobs: train()
)";

std::vector<size_t> around(size_t number) { return loops_around(kSource, number); }

}  // namespace

TEST(a_line_is_in_the_loops_whose_blocks_hold_it) {
  const std::vector<size_t> both{2, 3}, outer{2}, none;
  CHECK(around(5) == both);  // in the middle of a call
  CHECK(around(8) == both);  // under a condition
  CHECK(around(3) == both);  // the statement itself asks for the next one
  CHECK(around(10) == outer);
  CHECK(around(12) == none);  // `else` of the loop
  CHECK(around(13) == none);
  CHECK(around(15) == none);  // a function that stands in none
  CHECK(around(16) == std::vector<size_t>{16});
}

TEST(a_line_that_is_not_there_is_in_no_loop) {
  CHECK(around(0).empty());
  CHECK(around(400).empty());
  CHECK(loops_around("", 1).empty());
}

}  // namespace farandole
