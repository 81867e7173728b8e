// Cells of recurrent layers: PyTorch has fused ones for every device but the CPU.
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using std::optional;

Tensor plus(Tensor gates, const optional<Tensor>& bias) {
  return bias && bias->defined() ? gates.add(*bias) : gates;
}

Tensor given(const optional<Tensor>& grad, const Tensor& like) {
  return grad && grad->defined() ? *grad : at::zeros_like(like);
}

Tensor bias_of(const Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0) : Tensor(); }

// The derivative of the sigmoid and of the hyperbolic tangent, from what they gave.
Tensor slope_of_sigmoid(const Tensor& y) { return y.mul(y.neg().add(1)); }
Tensor slope_of_tanh(const Tensor& y) { return y.mul(y).neg().add(1); }

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input_gates, const Tensor& hidden_gates,
                                        const Tensor& cx, const optional<Tensor>& input_bias,
                                        const optional<Tensor>& hidden_bias) {
  auto gates = plus(input_gates, input_bias).add(plus(hidden_gates, hidden_bias)).chunk(4, 1);
  auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(),
       out = gates[3].sigmoid();
  auto cy = forget.mul(cx).add(in.mul(cell));
  return {out.mul(cy.tanh()), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(const optional<Tensor>& grad_hy,
                                                 const optional<Tensor>& grad_cy, const Tensor& cx,
                                                 const Tensor& cy, const Tensor& workspace,
                                                 bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  auto &in = gates[0], &forget = gates[1], &cell = gates[2], &out = gates[3];
  auto hy = given(grad_hy, cx), tanh = cy.tanh();
  auto grad = hy.mul(out).mul(slope_of_tanh(tanh)).add(given(grad_cy, cx));
  auto grad_gates = at::cat({grad.mul(cell).mul(slope_of_sigmoid(in)),
                             grad.mul(cx).mul(slope_of_sigmoid(forget)),
                             grad.mul(in).mul(slope_of_tanh(cell)),
                             hy.mul(tanh).mul(slope_of_sigmoid(out))}, 1);
  return {grad_gates, grad.mul(forget), bias_of(grad_gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru(const Tensor& input_gates, const Tensor& hidden_gates,
                               const Tensor& hx, const optional<Tensor>& input_bias,
                               const optional<Tensor>& hidden_bias) {
  auto in = plus(input_gates, input_bias).chunk(3, 1);
  auto hidden = plus(hidden_gates, hidden_bias).chunk(3, 1);
  auto reset = in[0].add(hidden[0]).sigmoid(), update = in[1].add(hidden[1]).sigmoid();
  auto candidate = in[2].add(reset.mul(hidden[2])).tanh();
  return {candidate.add(update.mul(hx.sub(candidate))),
          at::cat({reset, update, candidate, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& grad,
                                                                const Tensor& workspace,
                                                                bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto &reset = kept[0], &update = kept[1], &candidate = kept[2], &hx = kept[3], &hidden = kept[4];
  auto of_update = grad.mul(hx.sub(candidate)).mul(slope_of_sigmoid(update));
  auto of_candidate = grad.mul(update.neg().add(1)).mul(slope_of_tanh(candidate));
  auto of_reset = of_candidate.mul(hidden).mul(slope_of_sigmoid(reset));
  auto in = at::cat({of_reset, of_update, of_candidate}, 1);
  auto out = at::cat({of_reset, of_update, of_candidate.mul(reset)}, 1);
  return {in, out, grad.mul(update), bias_of(in, has_bias), bias_of(out, has_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_backward);
  m.impl("_thnn_fused_gru_cell", gru);
  m.impl("_thnn_fused_gru_cell_backward", gru_backward);
}

}  // namespace sim
