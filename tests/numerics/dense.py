"""PRIV-HFL's algorithm as printed, in numpy, with all of its vectors; and problems whose optimum is known."""

import numpy as np

NUM_CLIENTS, DIM = 5, 6


class LeastSquares:
    """f_i = theta^T H_i theta / 2 - b_i^T theta with curvatures from 0.14 to 1."""

    def __init__(self, seed=0, num_clients=NUM_CLIENTS, dim=DIM):
        rng = np.random.default_rng(seed)
        self.start = rng.normal(size=dim)
        self.hessians, self.slopes = [], []
        for _ in range(num_clients):
            rotation = np.linalg.qr(rng.normal(size=(dim, dim)))[0]
            self.hessians.append(rotation @ np.diag(np.linspace(0.14, 1, dim)) @ rotation.T)
            self.slopes.append(2 * rng.normal(size=dim))

    def gradient(self, client, theta):
        return self.hessians[client] @ theta - self.slopes[client]

    def optimum(self, clients=range(NUM_CLIENTS)):
        """Return the minimum of the sum: a linear system."""
        return np.linalg.solve(sum(self.hessians[i] for i in clients), sum(self.slopes[i] for i in clients))

    def biased(self, incidence, weight):
        """Return the theta_i [N, m] that minimise sum f_i + weight / 2 |C theta|^2: a linear system."""
        num_clients, dim = len(self.hessians), len(self.start)
        system = weight * np.kron(incidence.T @ incidence, np.eye(dim))
        for i, hessian in enumerate(self.hessians):
            system[i * dim : (i + 1) * dim, i * dim : (i + 1) * dim] += hessian
        return np.linalg.solve(system, np.concatenate(self.slopes)).reshape(num_clients, dim)


class Logistic:
    """Mean logistic loss of 30 samples per client, plus 0.05 |theta|^2."""

    def __init__(self, seed=0, num_clients=NUM_CLIENTS, dim=DIM):
        rng = np.random.default_rng(seed)
        self.start = rng.normal(size=dim)
        self.inputs = rng.normal(size=(num_clients, 30, dim))
        truths = rng.normal(size=(num_clients, dim)) * 2
        self.signs = np.sign(np.einsum("nsd,nd->ns", self.inputs, truths) + rng.normal(size=(num_clients, 30)))

    def gradient(self, client, theta):
        margins = self.signs[client] * (self.inputs[client] @ theta)
        return -(self.signs[client] / (1 + np.exp(margins))) @ self.inputs[client] / 30 + 0.1 * theta

    def optimum(self, clients=range(NUM_CLIENTS)):
        """Return the minimum of the sum, by Newton's method."""
        theta = np.zeros_like(self.start)
        for _ in range(30):
            gradient, hessian = 0, 0
            for i in clients:
                shares = 1 / (1 + np.exp(self.signs[i] * (self.inputs[i] @ theta)))
                weighted = self.inputs[i].T * (shares * (1 - shares) / 30)
                hessian = hessian + weighted @ self.inputs[i] + 0.1 * np.eye(len(theta))
                gradient = gradient + self.gradient(i, theta)
            theta = theta - np.linalg.solve(hessian, gradient)
        return theta


def incidence(realisation, num_clients=NUM_CLIENTS):
    """Return C: differences of neighbours [N - 1, N], or from the mean [N, N]."""
    if realisation == "mean":
        return np.eye(num_clients) - 1 / num_clients
    return np.eye(num_clients)[:-1] - np.eye(num_clients, k=1)[:-1]


def local_steps(problem, client, theta, force, rate, steps):
    """Return the model after K steps along gradient + force."""
    for _ in range(steps):
        theta = theta - rate * (problem.gradient(client, theta) + force)
    return theta


class Dense:
    """Every client keeps nu_i and lambda_i of all constraints and sends both; the server averages them.

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
