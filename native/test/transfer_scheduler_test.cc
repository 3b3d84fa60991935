// Tests TransferScheduler with transfers that count. Prints each failed expectation and exits with
// their number.
#include "transfer/transfer_scheduler.h"
#include "expect.h"

using kv::nixl::Transfer;
using kv::nixl::TransferScheduler;

namespace {

struct Scene {
  Transfer::World world;
  std::vector<uint64_t> ended;
  TransferScheduler scheduler{[this](const Transfer& transfer) { ended.push_back(transfer.ticket()); }};
  std::vector<Transfer*> transfers;

  void add(int count, int slices, int polls) {
    for (int index = 0; index < count; ++index) {
      auto transfer = std::make_unique<Transfer>(world, transfers.size() + 1, slices, polls);
      transfers.push_back(transfer.get());
      scheduler.add(std::move(transfer));
    }
  }
  // Takes turns until nothing is left. Returns their number.
  int run(int most) {
    int turns = 0;
    while (!scheduler.empty() && turns < most) {
      scheduler.advance();
      ++turns;
    }
    return turns;
  }
};

void transfers_take_turns() {
  Scene scene;
  scene.add(3, 2, 0);
  scene.scheduler.advance();
  scene.add(1, 2, 0);
  scene.run(100);
  expect(scene.world.posts == std::vector<uint64_t>{1, 2, 3, 1, 4, 2, 3, 4}, "transfers do not take turns in the order of their tickets");
  expect(scene.ended == std::vector<uint64_t>{1, 2, 3, 4}, "transfers end in another order");
}

void waiting_transfers_cost_nothing() {
  Scene scene;
  scene.add(8000, 1, 0);
  expect(scene.run(10'000) == 8000, "a turn does not post one slice");
  expect(scene.world.calls == 8000, "transfers are looked after while they wait for their turn");
}

void transfers_under_way_have_a_bound_between_posts() {
  Scene scene;
  scene.add(8000, 1, 1'000'000);
  for (int turn = 0; turn < 7999; ++turn) scene.scheduler.advance();
  expect(scene.world.posts.size() == 7999, "a turn does not post one slice while others are under way");
  expect(scene.world.calls <= 7999 * 33, "all transfers under way are looked after between two posts");
  scene.scheduler.advance();
  const uint64_t before = scene.world.calls;
  scene.scheduler.advance();
  expect(scene.world.calls - before == 8000, "with nothing to post, not all transfers under way are looked after");
}

void transfers_under_way_end_in_time() {
  Scene scene;
  scene.add(100, 3, 4);
  scene.run(100'000);
  expect(scene.scheduler.empty() && scene.ended.size() == 100, "a transfer does not end");
}

void an_aborted_transfer_ends_while_it_waits() {
  Scene scene;
  scene.add(100, 1, 0);
  scene.transfers[49]->aborted = true;
  scene.scheduler.attend(50);
  scene.scheduler.attend(4711);
  expect(scene.ended == std::vector<uint64_t>{50}, "an aborted transfer waits for its turn");
  scene.run(1000);
  expect(scene.world.posts.size() == 99 && scene.ended.size() == 100, "an aborted transfer disturbs the turns of the others");
}

void abandoned_transfers_end_when_nothing_is_under_way() {
  Scene scene;
  scene.add(10, 2, 3);
  scene.scheduler.advance();
  scene.scheduler.abandon_all();
  expect(scene.ended.size() == 9, "transfers that were abandoned wait for their turn");
  scene.run(10);
  expect(scene.scheduler.empty() && scene.world.posts.size() == 1, "a transfer that was abandoned posts, or does not end");
}

void a_transfer_that_starts_posts_before_those_that_wait() {
  Scene scene;
  scene.add(3, 1, 0);
  const auto start = [&](uint64_t ticket, int slices, int polls) {
    scene.scheduler.start(std::make_unique<Transfer>(scene.world, ticket, slices, polls));
  };
  start(11, 1, 0);
  expect(scene.ended == std::vector<uint64_t>{11}, "a transfer that is complete when it is posted does not end at once");
  start(12, 1, 1);
  expect(scene.ended == std::vector<uint64_t>{11, 12}, "a transfer that has started is not looked at");
  start(13, 1, 3);
  start(14, 2, 0);
  expect(scene.world.posts == std::vector<uint64_t>{11, 12, 13, 14}, "a transfer that starts waits for its turn, or posts more than one slice");
  scene.run(100);
  expect(scene.scheduler.empty() && scene.ended.size() == 7 && scene.world.posts.size() == 8, "a transfer that takes longer does not end");
}

void transfers_can_be_taken() {
  Scene scene;
  scene.add(5, 2, 3);
  scene.scheduler.advance();
  expect(scene.scheduler.take_all().size() == 5 && scene.scheduler.empty() && scene.ended.empty(), "not all transfers are handed over");
  expect(!scene.scheduler.advance(), "transfers that were handed over have turns");
}

}  // namespace

int main() {
  transfers_take_turns();
  waiting_transfers_cost_nothing();
  transfers_under_way_have_a_bound_between_posts();
  transfers_under_way_end_in_time();
  an_aborted_transfer_ends_while_it_waits();
  abandoned_transfers_end_when_nothing_is_under_way();
  a_transfer_that_starts_posts_before_those_that_wait();
  transfers_can_be_taken();
  return failures;
}
