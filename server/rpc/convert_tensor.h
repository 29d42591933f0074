// Tensors between proto and engine structs; a decoded tensor is a view into its request message.
#ifndef SERVER_RPC_CONVERT_TENSOR_H_
#define SERVER_RPC_CONVERT_TENSOR_H_

#include <string>
#include <vector>

#include "base/error.h"
#include "expertd/v1/types.pb.h"
#include "kernels/types.h"
#include "server/engine/operations.h"

namespace expertd::rpc {

// More dimensions than any tensor of the API has; larger shapes are refused unread.
inline constexpr int kMaxDimensions = 8;

// Longest id a caller may choose, in bytes.
inline constexpr size_t kMaxIdBytes = 256;

// What a method expects of one of its tensors.
struct TensorRule {
  std::string path;           // "tokens", "topk.topk_ids"
  int dimensions = 2;         // -1: any number up to kMaxDimensions
  std::vector<DType> dtypes;  // which the method takes
};

// A view of `tensor`; a null `tensor` is a missing one. Reported below rule.path, all at once:
//   SHAPE_MISMATCH: missing, wrong number of dimensions, a negative one, a size that overflows;
//   DTYPE_UNSUPPORTED: unspecified, unknown, or not one of rule.dtypes;
//   PAYLOAD_SIZE_MISMATCH: the payload is not exactly the elements of the shape;
//   BUFFER_UNKNOWN: the payload is in a buffer without an id, or with one that is too long.
// Not present() when anything was reported. `tensor` must outlive the view. Whether there is such a
// buffer is for the engine to say.
engine::TensorInput FromProto(const v1::Tensor* tensor, const TensorRule& rule,
                              Violations* violations);

// The place that a request names. Not present() when it was reported, as above.
engine::BufferPlace FromProto(const v1::BufferRef& buffer, const std::string& path,
                              Violations* violations);

// Bytes of a tensor that comes without payload, of rule.dimensions or, with -1, of up to
// kMaxDimensions dimensions; -1 when anything was reported, as above.
int64_t CheckSpec(const v1::Tensor& tensor, const TensorRule& rule, Violations* violations);

// Reports where two tensors that are both present differ in dimension `a_dim` of `a` and `b_dim` of
// `b`: "a.shape[a_dim]: got 3, need 4 as in b.shape[b_dim]".
void CheckSameDimension(const engine::TensorInput& a, int a_dim, const engine::TensorInput& b,
                        int b_dim, Violations* violations);

// Copies the tensor with its payload, or names the buffer that holds it.
void ToProto(const engine::TensorOutput& tensor, v1::Tensor* out);

}  // namespace expertd::rpc

#endif  // SERVER_RPC_CONVERT_TENSOR_H_
