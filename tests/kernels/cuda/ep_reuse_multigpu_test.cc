// EP conformance between GPUs: the suite of all backends, on nccl and nccl_lsa.
#include "tests/conformance/ep/ep_reuse_test.cc"  // NOLINT: the suite is the same

namespace expertd::conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(MultiGpu, EpReuse,
                         testing::Combine(testing::Values("nccl", "nccl_lsa"), testing::Values(2)),
                         NameOf);

}  // namespace
}  // namespace expertd::conformance
