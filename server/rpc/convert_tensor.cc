// Checks a tensor's dtype, shape and payload size against each other, in checked arithmetic.
#include "server/rpc/convert_tensor.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/strings/escaping.h"
#include "base/strings.h"
#include "server/rpc/convert_config.h"

namespace expertd::rpc {
namespace {

constexpr size_t kShownIdBytes = 64;

std::string DtypeNames(const std::vector<DType>& dtypes) {
  std::string names;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    StrAppend(&names, i == 0 ? "" : " or ", DTypeName(dtypes[i]));
  }
  return names;
}

DType CheckDtype(const v1::Tensor& tensor, const TensorRule& rule, Violations* violations) {
  const DType dtype = FromProto(tensor.dtype());
  if (std::find(rule.dtypes.begin(), rule.dtypes.end(), dtype) != rule.dtypes.end()) return dtype;
  const std::string got = v1::DType_IsValid(tensor.dtype())
                              ? std::string(DTypeName(dtype))
                              : StrCat("value ", static_cast<int>(tensor.dtype()));
  violations->Add(Reason::kDtypeUnsupported, StrCat(rule.path, ".dtype"),
                  StrCat("got ", got, ", need ", DtypeNames(rule.dtypes)));
  return dtype;
}

// The number of elements, or nothing when the shape was reported.
std::optional<int64_t> CheckShape(const v1::Tensor& tensor, const TensorRule& rule,
                                  Violations* violations) {
  if (tensor.shape_size() != rule.dimensions) {
    violations->Add(Reason::kShapeMismatch, StrCat(rule.path, ".shape"),
                    StrCat("got ", tensor.shape_size(), " dimensions, need ", rule.dimensions));
    if (tensor.shape_size() > kMaxDimensions) return std::nullopt;
  }
  bool valid = tensor.shape_size() == rule.dimensions;
  bool empty = false;
  for (int i = 0; i < tensor.shape_size(); ++i) {
    empty |= tensor.shape(i) == 0;
    if (tensor.shape(i) >= 0) continue;
    violations->Add(Reason::kShapeMismatch, StrCat(rule.path, ".shape[", i, "]"),
                    StrCat("got ", tensor.shape(i), ", need at least 0"));
    valid = false;
  }
  if (!valid) return std::nullopt;
  if (empty) return 0;
  int64_t elements = 1;
  for (const int64_t size : tensor.shape()) {
    if (__builtin_mul_overflow(elements, size, &elements)) {
      violations->Add(Reason::kShapeMismatch, StrCat(rule.path, ".shape"),
                      "got more elements than 64 bits count");
      return std::nullopt;
    }
  }
  return elements;
}

void CheckPayload(const v1::Tensor& tensor, const TensorRule& rule, int64_t elements, DType dtype,
                  Violations* violations) {
  int64_t need = 0;
  if (__builtin_mul_overflow(elements, static_cast<int64_t>(DTypeSize(dtype)), &need)) {
    violations->Add(Reason::kShapeMismatch, StrCat(rule.path, ".shape"),
                    "got more bytes than 64 bits count");
    return;
  }
  const int64_t got = static_cast<int64_t>(tensor.data().size());
  if (got == need) return;
  violations->Add(Reason::kPayloadSizeMismatch, StrCat(rule.path, ".data"),
                  StrCat("got ", got, " bytes, need ", need, " (", elements, " elements of ",
                         DTypeName(dtype), ")"));
}

}  // namespace

engine::TensorInput FromProto(const v1::Tensor* tensor, const TensorRule& rule,
                              Violations* violations) {
  if (tensor == nullptr) {
    violations->Add(Reason::kShapeMismatch, rule.path, "got no tensor, need one");
    return {};
  }
  const size_t before = violations->size();
  const DType dtype = CheckDtype(*tensor, rule, violations);
  const std::optional<int64_t> elements = CheckShape(*tensor, rule, violations);
  if (tensor->has_buffer()) {
    RejectBuffer(tensor->buffer(), StrCat(rule.path, ".buffer"), violations);
  } else if (elements && dtype != DType::kInvalid) {
    CheckPayload(*tensor, rule, *elements, dtype, violations);
  }
  if (violations->size() != before) return {};
  engine::TensorInput out;
  out.dtype = dtype;
  out.shape.assign(tensor->shape().begin(), tensor->shape().end());
  out.data = tensor->data().data();
  out.bytes = static_cast<int64_t>(tensor->data().size());
  out.path = rule.path;
  return out;
}

void RejectBuffer(const v1::BufferRef& buffer, const std::string& path, Violations* violations) {
  const std::string& id = buffer.buffer_id();
  violations->Add(
      Reason::kBufferUnknown, path,
      StrCat("got buffer \"", absl::CEscape(id.substr(0, kShownIdBytes)),
             id.size() > kShownIdBytes ? "..." : "",
             "\", which is not registered; this daemon cannot register buffers yet: send the "
             "payload inline"));
}

void CheckSameDimension(const engine::TensorInput& a, int a_dim, const engine::TensorInput& b,
                        int b_dim, Violations* violations) {
  if (!a.present() || !b.present() || a.shape[a_dim] == b.shape[b_dim]) return;
  violations->Add(Reason::kShapeMismatch, StrCat(a.path, ".shape[", a_dim, "]"),
                  StrCat("got ", a.shape[a_dim], ", need ", b.shape[b_dim], " as in ", b.path,
                         ".shape[", b_dim, "]"));
}

void ToProto(const engine::TensorOutput& tensor, v1::Tensor* out) {
  out->set_dtype(ToProto(tensor.dtype));
  out->mutable_shape()->Add(tensor.shape.begin(), tensor.shape.end());
  out->set_data(tensor.data);
}

}  // namespace expertd::rpc
