"""Wrong engines: the plain one of grade_right with one piece of its text replaced, by part."""

from __future__ import annotations

MUTANTS = {
    "data_parallel": [
        ("first = dist.get_global_rank(group, 0)", "first = 0"),
        ("(*module.parameters(), *module.buffers())", "module.parameters()"),
        ("            tensor.data.copy_(whole)", "            pass"),
        ("            dist.broadcast(whole, first, group=group)", "            pass"),
        ("dist.all_reduce(has, group=self.group)", "dist.all_reduce(has)"),
        ("        dist.all_reduce(has, group=self.group)\n", ""),
        ("if ranks and p.grad is None:", "if p.grad is None:"),
        ("if ranks and p.grad is None:", "if False:"),
        ("            flat /= self.group.size()\n", ""),
        ("flat /= self.group.size()", "flat /= dist.get_world_size()"),
        ("flat /= self.group.size()", "flat /= 2"),
        ("dist.all_reduce(flat, group=self.group)", "dist.all_reduce(flat)"),
        ("            dist.all_reduce(flat, group=self.group)\n",
         2 * "            dist.all_reduce(flat, group=self.group)\n"
         + "            flat /= self.group.size()\n"),
        ("                start += g.numel()\n", ""),
        ("g.copy_(flat[start : start + g.numel()].view(g.shape))",
         "g.t().copy_(flat[start : start + g.numel()].view(g.t().shape))"),
        ("setdefault(g.dtype, [[]])", "setdefault(0, [[]])"),
        ("> self.limit", "> 10 * self.limit"),
        ("> self.limit", "> 0"),
        ("        return [bucket for mine in found.values() for bucket in mine]",
         "        return [bucket for mine in found.values() for bucket in mine][:-1]"),
        ("        return [bucket for mine in found.values() for bucket in mine]",
         "        return list(found.values())[0]"),
        ("    def no_sync(self):\n        yield", "    def no_sync(self):\n        yield\n"
         "        self.finish()"),
        ("* group.size() / total", "/ total"),
        ("* group.size() / total", "* dist.get_world_size() / total"),
        ("    dist.all_reduce(total, group=group)\n", ""),
        ("dist.all_reduce(total, group=group)", "dist.all_reduce(total)"),
        ("return loss_sum * group.size() / total.item()", "return loss_sum / max(count, 1)"),
        ("import torch\n", ""),
    ],
}  # fmt: skip
