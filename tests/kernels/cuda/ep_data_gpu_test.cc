// EP conformance of one GPU: the suite of all backends, on nccl and nccl_lsa.
#include "tests/conformance/ep/ep_data_test.cc"  // NOLINT: the suite is the same

namespace expertd::conformance {
namespace {

INSTANTIATE_TEST_SUITE_P(Gpu, EpData,
                         testing::Combine(testing::Values("nccl", "nccl_lsa"), testing::Values(1)),
                         NameOf);

}  // namespace
}  // namespace expertd::conformance
