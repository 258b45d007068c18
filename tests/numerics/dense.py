"""PRIV-HFL's algorithm as printed in the paper, in numpy, with all of its vectors."""

import numpy as np

from experiments.dual.toy_problems import local_steps


class Dense:
    """Reference in which every client keeps nu_i and lambda_i of all constraints and sends both to be averaged.

    E_i = (C_i (x) I; -C_i (x) I), e_i = E_i theta_i; nu_i = nu_bar + N (e_i' - e_i), lambda_i = [lambda_bar + beta
    (nu_bar - sigma beta lambda_bar)]_+, and the local steps are along grad f_i + E_i^T lambda_bar. An absent client has
    nu_i = nu_bar.
    """

    def __init__(self, problem, rule, matrix, rate, steps):
        self.problem, self.rule, self.rate, self.steps = problem, rule, rate, steps
        self.num_clients, dim = matrix.shape[1], len(problem.start)
        columns = [np.kron(matrix[:, [i]], np.eye(dim)) for i in range(self.num_clients)]
        self.blocks = [np.concatenate([column, -column]) for column in columns]
        self.theta = np.tile(problem.start, (self.num_clients, 1))
        start = [self.num_clients * block @ theta for block, theta in zip(self.blocks, self.theta, strict=True)]
        self.nu = np.mean(start, axis=0)
        self.multiplier = np.zeros_like(self.nu)

    def ascend(self, nu):
        copies = []
        for _ in range(self.num_clients):  # each client computes the same
            ascent = nu - self.rule.sigma * self.rule.step * self.multiplier
            copy = self.multiplier + self.rule.step * ascent
            copies.append(np.maximum(copy, 0) if self.rule.projection else copy)
        return np.mean(copies, axis=0)

    def round(self, clients=None):
        present = range(self.num_clients) if clients is None else clients
        # alternating: from the newest nu; published: from the models of one round before, see below
        before, copies = self.nu, [self.nu] * self.num_clients
        multiplier = self.ascend(before)
        used = multiplier if self.rule.order == "alternating" else self.multiplier
        for i in present:
            force = self.blocks[i].T @ used
            moved = local_steps(self.problem, i, self.theta[i], force, self.rate, self.steps)
            copies[i] = before + self.num_clients * self.blocks[i] @ (moved - self.theta[i])
            self.theta[i] = moved
        self.nu, self.multiplier = np.mean(copies, axis=0), multiplier
