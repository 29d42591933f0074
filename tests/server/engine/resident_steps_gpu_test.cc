// Resident tensors on one GPU.
#include "tests/server/engine/resident_steps.h"

namespace expertd::engine {
namespace {

INSTANTIATE_TEST_SUITE_P(Gpu, ResidentStepsTest, testing::Values(ResidentShape{"nccl", 1}),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace expertd::engine
