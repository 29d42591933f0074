// Names are answered for at once; bytes move in the streams.
#include "server/rpc/tensor_service.h"

#include "server/rpc/convert_config.h"
#include "server/rpc/put_stream.h"
#include "server/rpc/tensor_stream.h"
#include "server/rpc/unary_call.h"
#include "server/rpc/unsupported.h"

namespace expertd::rpc {

grpc::ServerReadReactor<v1::PutTensorRequest>* TensorService::PutTensor(
    grpc::CallbackServerContext* context, v1::PutTensorResponse* response) {
  return PutStream::Start(engine_, calls_, context, response);
}

grpc::ServerWriteReactor<v1::GetTensorResponse>* TensorService::GetTensor(
    grpc::CallbackServerContext*, const v1::GetTensorRequest* request) {
  return TensorStream::Start(engine_, calls_, *request);
}

grpc::ServerUnaryReactor* TensorService::DeleteTensor(grpc::CallbackServerContext* context,
                                                      const v1::DeleteTensorRequest* request,
                                                      v1::DeleteTensorResponse*) {
  return AnswerNow(context, engine_.DeleteTensor(request->buffer_id()));
}

grpc::ServerUnaryReactor* TensorService::ListTensors(grpc::CallbackServerContext* context,
                                                     const v1::ListTensorsRequest*,
                                                     v1::ListTensorsResponse* response) {
  for (const engine::TensorInfo& info : engine_.ListTensors()) {
    v1::TensorEntry* entry = response->add_tensors();
    entry->set_buffer_id(info.buffer_id);
    entry->set_dtype(ToProto(info.dtype));
    entry->mutable_shape()->Assign(info.shape.begin(), info.shape.end());
    entry->set_size_bytes(info.bytes);
    entry->set_epoch(info.epoch);
  }
  response->set_used_bytes(engine_.Counters().tensor_bytes);
  response->set_limit_bytes(limit_bytes_);
  return AnswerNow(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* TensorService::RegisterSharedMemory(
    grpc::CallbackServerContext* context, const v1::RegisterSharedMemoryRequest*,
    v1::RegisterSharedMemoryResponse*) {
  return AnswerNow(context, Unsupported("TensorService.RegisterSharedMemory"));
}

grpc::ServerUnaryReactor* TensorService::RegisterCudaMemory(grpc::CallbackServerContext* context,
                                                            const v1::RegisterCudaMemoryRequest*,
                                                            v1::RegisterCudaMemoryResponse*) {
  return AnswerNow(context, Unsupported("TensorService.RegisterCudaMemory"));
}

grpc::ServerUnaryReactor* TensorService::UnregisterMemory(grpc::CallbackServerContext* context,
                                                          const v1::UnregisterMemoryRequest*,
                                                          v1::UnregisterMemoryResponse*) {
  return AnswerNow(context, Unsupported("TensorService.UnregisterMemory"));
}

}  // namespace expertd::rpc
