// Checks a tensor's dtype, shape and payload size against each other, in checked arithmetic.
#include "server/rpc/convert_tensor.h"

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/strings.h"
#include "server/engine/tensor_store.h"
#include "server/rpc/convert_config.h"

namespace expertd::rpc {
namespace {

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
  bool valid = rule.dimensions < 0 ? tensor.shape_size() <= kMaxDimensions
                                   : tensor.shape_size() == rule.dimensions;
  if (!valid) {
    violations->Add(
        Reason::kShapeMismatch, StrCat(rule.path, ".shape"),
        StrCat("got ", tensor.shape_size(), " dimensions, need ",
               rule.dimensions < 0 ? StrCat("at most ", kMaxDimensions) : StrCat(rule.dimensions)));
    if (tensor.shape_size() > kMaxDimensions) return std::nullopt;
  }
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

// The bytes of so many elements, or nothing when they were reported.
std::optional<int64_t> CheckBytes(const TensorRule& rule, int64_t elements, DType dtype,
                                  Violations* violations) {
  int64_t bytes = 0;
  if (!__builtin_mul_overflow(elements, static_cast<int64_t>(DTypeSize(dtype)), &bytes)) {
    return bytes;
  }
  violations->Add(Reason::kShapeMismatch, StrCat(rule.path, ".shape"),
                  "got more bytes than 64 bits count");
  return std::nullopt;
}

void CheckPayload(const v1::Tensor& tensor, const TensorRule& rule, int64_t elements, DType dtype,
                  int64_t need, Violations* violations) {
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
  engine::TensorInput out;
  out.dtype = CheckDtype(*tensor, rule, violations);
  const std::optional<int64_t> elements = CheckShape(*tensor, rule, violations);
  std::optional<int64_t> bytes;
  if (elements && out.dtype != DType::kInvalid) {
    bytes = CheckBytes(rule, *elements, out.dtype, violations);
  }
  if (tensor->has_buffer()) {
    out.buffer = FromProto(tensor->buffer(), StrCat(rule.path, ".buffer"), violations);
  } else {
    if (bytes) CheckPayload(*tensor, rule, *elements, out.dtype, *bytes, violations);
    out.data = tensor->data().data();
  }
  if (violations->size() != before) return {};
  out.shape.assign(tensor->shape().begin(), tensor->shape().end());
  out.bytes = *bytes;
  out.path = rule.path;
  return out;
}

engine::BufferPlace FromProto(const v1::BufferRef& buffer, const std::string& path,
                              Violations* violations) {
  const std::string& id = buffer.buffer_id();
  if (id.empty() || id.size() > kMaxIdBytes) {
    violations->Add(
        Reason::kBufferUnknown, StrCat(path, ".buffer_id"),
        StrCat("got ", engine::ShownId(id), " of ", id.size(), " bytes, need 1 to ", kMaxIdBytes));
    return {};
  }
  engine::BufferPlace place;
  place.path = path;
  place.buffer_id = id;
  place.offset_bytes = buffer.offset_bytes();
  return place;
}

int64_t CheckSpec(const v1::Tensor& tensor, const TensorRule& rule, Violations* violations) {
  const size_t before = violations->size();
  const DType dtype = CheckDtype(tensor, rule, violations);
  const std::optional<int64_t> elements = CheckShape(tensor, rule, violations);
  std::optional<int64_t> bytes;
  if (elements && dtype != DType::kInvalid) bytes = CheckBytes(rule, *elements, dtype, violations);
  if (tensor.payload_case() != v1::Tensor::PAYLOAD_NOT_SET) {
    violations->Add(Reason::kPayloadSizeMismatch, rule.path, "got a payload, need none here");
  }
  return violations->size() == before ? *bytes : -1;
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
  if (tensor.buffer.present()) {
    out->mutable_buffer()->set_buffer_id(tensor.buffer.buffer_id);
    out->mutable_buffer()->set_offset_bytes(tensor.buffer.offset_bytes);
  } else {
    out->set_data(tensor.data);
  }
}

}  // namespace expertd::rpc
