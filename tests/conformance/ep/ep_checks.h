// Checks that several EP conformance tests share.
#ifndef TESTS_CONFORMANCE_EP_EP_CHECKS_H_
#define TESTS_CONFORMANCE_EP_EP_CHECKS_H_

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/conformance/ep/ep_world.h"

namespace expertd::conformance {

// Dispatches TokenRows(salt 7) and checks rows, weights, pads and the tail.
inline void CheckDispatch(EpWorld& world, const Problem& problem, const Layout& layout,
                          const Handles& handles, DType dtype, bool with_weights) {
  const OpContext context = world.Next();
  world.Run([&](int64_t rank) {
    const auto index = static_cast<size_t>(rank);
    const std::vector<SlotSource>& slots = layout.slots[index];
    const auto total = static_cast<int64_t>(slots.size());
    TestMatrix x = TokenRows(problem, rank, dtype, 7);
    TestMatrix recv_x(dtype, total + 4, problem.scenario.hidden);
    std::vector<float> recv_w(slots.size() + 4, -77.0f);
    const absl::Status status =
        world.rank(rank).Dispatch(context, *handles[index], x.view(),
                                  with_weights ? problem.ranks[index].weights.data() : nullptr,
                                  recv_x.view(), with_weights ? recv_w.data() : nullptr);
    ASSERT_TRUE(status.ok()) << status;
    TestMatrix expected = SlotRows(problem, layout, rank, dtype, 7);
    const std::vector<float> expected_w = SlotWeights(problem, layout, rank);
    for (int64_t slot = 0; slot < total; ++slot) {
      const bool pad = slots[static_cast<size_t>(slot)].source < 0;
      if (pad) {
        ASSERT_TRUE(recv_x.RowIs(slot, std::byte{0})) << "pad slot " << slot;
      } else {
        ASSERT_EQ(std::memcmp(recv_x.At(slot, 0), expected.At(slot, 0), expected.row_bytes()), 0)
            << "slot " << slot;
      }
      if (!with_weights) continue;
      ASSERT_EQ(recv_w[static_cast<size_t>(slot)],
                pad ? 0.0f : expected_w[static_cast<size_t>(slot)]);
    }
    for (int64_t slot = total; slot < total + 4; ++slot) {
      ASSERT_TRUE(recv_x.RowIs(slot, std::byte{0xFF})) << "past the total: " << slot;
      ASSERT_EQ(recv_w[static_cast<size_t>(slot)], -77.0f);
    }
  });
}

}  // namespace expertd::conformance

#endif  // TESTS_CONFORMANCE_EP_EP_CHECKS_H_
