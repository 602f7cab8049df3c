"""What the package uses of NVIDIA apex, in plain torch: apex itself needs CUDA.

From apex/optimizers/fused_lamb.py: settings and the number of updates are a group's, the moments are a weight's; `step`
is missing until the first update.
"""

import torch


class FusedLAMB(torch.optim.Optimizer):
    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, amsgrad=False,
        adam_w_mode=True, grad_averaging=True, set_grad_none=True, max_grad_norm=1.0, use_nvlamb=False,
    ):  # fmt: skip
        settings = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, dict(**settings, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm))
        assert adam_w_mode and grad_averaging and not amsgrad
        self.use_nvlamb = use_nvlamb

    @torch.no_grad()
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        bound = self.defaults["max_grad_norm"]
        divisor = norm / bound if norm > bound else 1.0
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad / divisor, group)

    def update(self, p, gradient, group):
        state = self.state[p]
        if len(state) == 0:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        (b1, b2), m, v = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        m.mul_(b1).add_((1 - b1) * gradient)
        v.mul_(b2).add_((1 - b2) * gradient**2)
        c1, c2 = (1 - b ** group["step"] if group["bias_correction"] else 1 for b in (b1, b2))
        p.grad.copy_(m / c1 / ((v / c2).sqrt() + group["eps"]) + group["weight_decay"] * p)
        norms, ratio = (p.norm(), p.grad.norm()), 1.0
        if (self.use_nvlamb or group["weight_decay"]) and all(norms):
            ratio = norms[0] / norms[1]
        p.sub_(group["lr"] * ratio * p.grad)
