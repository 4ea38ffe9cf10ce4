# SPDX-License-Identifier: Apache-2.0
"""One line per rule. It alone drives the oracle and the contract tests.

A line may also stand beside its oracle, in `CASES` of an oracle module.
"""

import numpy as np
import oracle_parts as parts
import oracles_convex as convex
import oracles_matrix as matrix
import oracles_moments as moments
import oracles_public as public
import oracles_wrapped as wrapped

from tfdp_adaptive import rules

Case = parts.Case
BASIS = np.linalg.qr(np.random.default_rng(7).normal(size=(5, 3)))[0]
EYE = np.eye(5)
ELLIPSOID = np.array([4.0, 1.0, 0.25, 9.0, 0.5])
ELLIPSOID_TREE = [ELLIPSOID[:2], ELLIPSOID[2:].reshape(1, 3)]
MOMENT = np.array([1.0, 0.1, 2.0, 0.5, 0.3])
MOMENT_TREE = [MOMENT[:2], MOMENT[2:].reshape(1, 3)]
BOX = (-0.4, 0.5)
ROOT2 = np.sqrt(2)


def into_box(h, y):
  del h
  return np.clip(y, *BOX)


def into_ball(h, y):
  return convex.metric_ball(h, y, 0.6)


# IME at B = 4: sqrt(2) (2 B - 1) / B^2, or one clip norm squared over B per record.
_IME = dict(std1=ROOT2 / 4, std2=ROOT2 * 7 / 16)

RULES = (
    *(case for module in (convex, matrix, moments, public, wrapped)
      for case in getattr(module, 'CASES', ())),
    Case('dp_sgd', rules.dp_sgd, moments.sgd()),
    Case('dp_sgd-replace', rules.dp_sgd, moments.sgd(), dict(adjacency='replace')),
    Case('dp_sgd-momentum', lambda: rules.dp_sgd(0.8), moments.sgd(0.8)),
    Case('dp_sgd-nesterov', lambda: rules.dp_sgd(0.8, True), moments.sgd(0.8, True)),
    Case('dp_adam', lambda: rules.dp_adam(0.8, 0.95, 1e-3), moments.adam(0.8, 0.95, 1e-3)),
    Case('dp_adam-no_memory', lambda: rules.dp_adam(0.0, 0.0, 0.1), moments.adam(0.0, 0.0, 0.1)),
    Case('grouped-dp_adam_bc', lambda: rules.grouped(
        rules.dp_adam_bc(0.8, 0.9, 0.05), (0, 1), norms=(1.0, 3.0)),
         wrapped.grouped_adam_bc(2, (1.0, 3.0), 0.8, 0.9, 0.05), dict(adjacency='replace')),
    Case('partition-dp_sgd-dp_adam_bc', lambda: rules.partition([
        (lambda spec: spec.shape == [2], rules.dp_sgd(0.8)),
        (lambda spec: True, rules.dp_adam_bc(0.8, 0.9, 0.05))]),
         wrapped.joined(2, wrapped.heavy_ball(0.8), wrapped.corrected_adam(0.8, 0.9, 0.05)),
         dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('muon-edge', lambda: rules.partition([
        (lambda spec: len(spec.shape) == 2, rules.muon(0.8, nesterov=False, edge=True)),
        (lambda spec: True, rules.dp_sgd())]),
         wrapped.joined(2, wrapped.heavy_ball(0.0), matrix.without_edge(0.8, (1, 3))),
         dict(sigma=0.2)),
    Case('dp_muon', lambda: rules.dp_muon(
        0.8, beta_1=0.7, beta_2=0.9, epsilon=0.1, relative_adam_learning_rate=0.5),
         wrapped.joined(2, wrapped.plain_adam(0.7, 0.9, 0.1, 0.5), matrix.quintic(
             0.8, (1, 3), nesterov=True))),
    Case('dp_adagrad', lambda: rules.dp_adagrad(0.1, 0.0), moments.adagrad(0.1, 0.0)),
    Case('dp_rmsprop', lambda: rules.dp_rmsprop(0.8), moments.rmsprop(0.8, 1e-8)),
    Case('dp_adam-amsgrad', lambda: rules.dp_adam(0.8, 0.6, 0.05, amsgrad=True),
         moments.adam(0.8, 0.6, 0.05, amsgrad=True)),
    Case('dp_rmsprop-momentum', lambda: rules.dp_rmsprop(0.8, 0.05, momentum=0.7),
         moments.rmsprop(0.8, 0.05, 0.7)),
    Case('dp_rmsprop-centered', lambda: rules.dp_rmsprop(0.8, 0.05, centered=True),
         moments.rmsprop(0.8, 0.05, centered=True)),
    Case('dp_rmsprop-centered_momentum', lambda: rules.dp_rmsprop(0.8, 0.05, 0.7, True),
         moments.rmsprop(0.8, 0.05, 0.7, True)),
    Case('dp_yogi', lambda: rules.dp_yogi(0.8, 0.9), moments.yogi(0.8, 0.9, 1e-3, 1e-6)),
    Case('dp_adam_bc', lambda: rules.dp_adam_bc(0.8, 0.9, 0.05), moments.adam_bc(0.8, 0.9, 0.05)),
    Case('dp_adam_bc-rows', lambda: rules.dp_adam_bc(0.8, 0.9, 0.05),
         moments.adam_bc(0.8, 0.9, 0.05), dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_adagrad_bc', lambda: rules.dp_adagrad_bc(epsilon=0.05), moments.adagrad_bc(0.05),
         dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_rmsprop_bc', lambda: rules.dp_rmsprop_bc(0.8, 0.05), moments.rmsprop_bc(0.8, 0.05),
         dict(row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_adam_ime', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05),
         moments.two_moments(moments.adam_second(0.9), 0.05, b1=0.8, **_IME)),
    Case('dp_adam_ime-share', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05, share=0.8),
         moments.two_moments(moments.adam_second(0.9), 0.05, std1=0.25 / np.sqrt(0.8),
                             std2=7 / 16 / np.sqrt(0.2), b1=0.8)),
    Case('dp_adam_ime-replace', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05),
         moments.two_moments(moments.adam_second(0.9), 0.05, std1=ROOT2 / 2, std2=ROOT2 * 3 / 4,
                             b1=0.8), dict(adjacency='replace')),
    Case('dp_adam_ime-printed', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05, printed_2B_plus_1=True),
         moments.two_moments(moments.adam_second(0.9), 0.05, std1=ROOT2 / 4, std2=ROOT2 * 9 / 16,
                             b1=0.8)),
    Case('dp_adam_ime-update_clip', lambda: rules.dp_adam_ime(0.8, 0.9, 0.05, update_clip=4.0),
         moments.two_moments(moments.adam_second(0.9), 0.05, b1=0.8, update_clip=4.0, **_IME)),
    Case('dp_adam_ime-per_record', lambda: rules.dp_adam_ime(
        0.8, 0.9, 0.05, floor=True, square_then_average=True),
         moments.two_moments(moments.adam_second(0.9), 0.05, std1=ROOT2 / 4, std2=ROOT2 / 4, b1=0.8,
                             per_record=True, floor=True), dict(clip=2.0)),
    Case('dp_adagrad_ime', lambda: rules.dp_adagrad_ime(epsilon=1.0, floor=True),
         moments.two_moments(moments.adagrad_second, 1.0, floor=True, **_IME)),
    Case('dp_adam_jme', lambda: rules.dp_adam_jme(0.8, 0.9, 0.05),
         moments.two_moments(moments.adam_second(0.9), 0.05, std1=0.5, std2=0.5 * ROOT2,
                             b1=0.8, per_record=True), dict(adjacency='replace', clip=2.0)),
    Case('dp_adam_jme-zero_out', lambda: rules.dp_adam_jme(0.8, 0.9, 0.05),
         moments.two_moments(moments.adam_second(0.9), 0.05, std1=np.sqrt(1.5) / 4,
                             std2=np.sqrt(3) / 4, b1=0.8, per_record=True)),
    Case('dp_adam_jme-of_mean', lambda: rules.dp_adam_jme(
        0.8, 0.9, 0.05, square_then_average=False, relative_lambda=0.25),
         moments.two_moments(moments.adam_second(0.9), 0.05, b1=0.8,
                             std1=0.5 * np.sqrt(1 + 0.25 * 1.5**2),
                             std2=np.sqrt(1 + 0.25 * 1.5**2)), dict(adjacency='replace')),
    Case('scale_then_privatize', lambda: rules.scale_then_privatize(
        0.8, 0.9, 1e-3, scale_epsilon=0.2),
         moments.scale_then_privatize('adam', 1e-3, 0.2, b1=0.8), dict(clip=3.0)),
    Case('dp_adagrad_stp', lambda: rules.dp_adagrad_stp(scale_epsilon=0.2),
         moments.scale_then_privatize('adagrad', 1e-8, 0.2), dict(clip=3.0)),
    Case('dp_rmsprop_stp', lambda: rules.dp_rmsprop_stp(0.9, scale_epsilon=0.2),
         moments.scale_then_privatize('rmsprop', 1e-8, 0.2), dict(clip=3.0)),
    Case('dp_shampoo', lambda: rules.dp_shampoo(0.8, 0.9, 0.05, scale_epsilon=0.1, refresh_every=2),
         matrix.kronecker(False, 0.8, 0.9, 0.05, 0.1, 2)),
    Case('dp_soap', lambda: rules.dp_soap(0.8, 0.9, 0.05, scale_epsilon=0.1, refresh_every=2),
         matrix.kronecker(True, 0.8, 0.9, 0.05, 0.1, 2), dict(
             row_norms=(1.0, 1.1, 1.3, 0.9, 1.2, 1.0, 1.4))),
    Case('dp_kfc', lambda: rules.dp_kfc(
        0.5, scale_epsilon=0.1, decay=0.6, refresh_every=3), matrix.kfc(0.5, 0.5, 0.1, 0.6, 3),
         dict(clip=2.0)),
    Case('dp_kfc-raw', lambda: rules.dp_kfc(
        power=0.3, scale_epsilon=0.2, decay=0.0, refresh_every=1, frame='raw'),
         matrix.kfc(0.0, 0.3, 0.2, 0.0, 1, raw=True), dict(clip=2.0)),
    Case('dp2_rmsprop', lambda: rules.dp2_rmsprop(2, 3, 5.0, 0.4, epsilon=0.01),
         public.dp2('rmsprop', 2, 3, 5.0, 0.04, 0.01)),
    Case('dp2_adagrad', lambda: rules.dp2_adagrad(1, 2, 5.0, 0.4, epsilon=0.01),
         public.dp2('adagrad', 1, 2, 5.0, 0.04, 0.01)),
    Case('dp2_yogi', lambda: rules.dp2_yogi(2, 1, 5.0, 0.4, epsilon=0.01, rho=0.8),
         public.dp2('yogi', 2, 1, 5.0, 0.04, 0.01, beta=0.8)),
    Case('dp2_rmsprop-noise_first', lambda: rules.dp2(
        sgd_steps=2, adaptive_steps=1, relative_adaptive_learning_rate=0.4, epsilon=0.01,
        ablation='noise_first'),
         public.dp2('rmsprop', 2, 1, None, 0.04, 0.01, noise_first=True)),
    Case('dp2_rmsprop-subtract_bias', lambda: rules.dp2(
        sgd_steps=2, adaptive_steps=1, relative_adaptive_clip=5.0,
        relative_adaptive_learning_rate=0.4, epsilon=0.01, subtract_bias=True),
         public.dp2('rmsprop', 2, 1, 5.0, 0.04, 0.01, subtract=True)),
    Case('dp2_rmsprop-extra_query', lambda: rules.dp2_rmsprop(
        3, 3, 5.0, 0.4, epsilon=0.01, ablation='extra_query'),
         public.dp2_extra_query('rmsprop', 3, 5.0, 0.04, 0.01)),
    Case('side_information_adam', lambda: rules.side_information_adam(0.8, 0.9),
         public.side_information(0.8, 0.9, 1e-8)),
    Case('side_information_adam-offline', lambda: rules.side_information_adam(
        0.8, second_moment=MOMENT_TREE), public.side_information(0.8, None, 1e-8, MOMENT)),
    Case('adadps', rules.adadps, public.adadps('rmsprop', 1e-3), dict(clip=3.0)),
    Case('adadps-adagrad', lambda: rules.adadps('adagrad', epsilon=0.1, epsilon_inside=True),
         public.adadps('adagrad', 0.1, inside=True), dict(clip=3.0)),
    Case('pda_dpmd', lambda: rules.pda_dpmd(5), public.pda_dpmd(5)),
    Case('pdp_sgd', lambda: rules.pdp_sgd(2), public.pdp_sgd(2)),
    Case('pdp_sgd-randomized', lambda: rules.pdp_sgd(3, method='randomized', project_after=2),
         public.pdp_sgd(3, after=2)),
    Case('pdp_sgd-basis', lambda: rules.pdp_sgd(basis=BASIS), public.pdp_sgd(basis=BASIS)),
    Case('pasan', lambda: rules.pasan(ELLIPSOID_TREE, radius=0.6), convex.ellipsoidal(
        True, ELLIPSOID, convex.euclidean, lambda h, y: parts.clip(y, 0.6))),
    Case('pasan-rescale', lambda: rules.pasan(2.0, 'rescale', box=BOX),
         convex.ellipsoidal(True, np.full(5, 2.0), convex.rescale, into_box)),
    Case('pagan', lambda: rules.pagan(ELLIPSOID_TREE), convex.ellipsoidal(
        False, ELLIPSOID, convex.euclidean)),
    Case('pagan-rescale', lambda: rules.pagan(ELLIPSOID_TREE, 'rescale'), convex.ellipsoidal(
        False, ELLIPSOID, convex.rescale)),
    Case('pagan-box', lambda: rules.pagan(box=BOX), convex.ellipsoidal(
        False, np.ones(5), convex.euclidean, into_box)),
    Case('pagan-ball', lambda: rules.pagan(ELLIPSOID_TREE, radius=0.6), convex.ellipsoidal(
        False, ELLIPSOID, convex.euclidean, into_ball)),
    Case('noisy_adagrad', lambda: rules.noisy_adagrad(2, basis=BASIS),
         convex.noisy_adagrad(2, BASIS, 'truncate'), dict(sigma=0.2)),
    Case('noisy_adagrad-ball', lambda: rules.noisy_adagrad(2, basis=BASIS, radius=0.6),
         convex.noisy_adagrad(2, BASIS, 'truncate', convex.ball_in_range(0.6)),
         dict(sigma=0.05)),
    Case('noisy_adagrad-floor', lambda: rules.noisy_adagrad(
        2, basis=BASIS, mode='floor', relative_noise=2.0, radius=1.5),
         convex.noisy_adagrad(2, BASIS, 'floor', convex.ball_in_range(1.5), relative=2.0)),
    Case('noisy_adagrad-pinv', lambda: rules.noisy_adagrad(2, basis=EYE, mode='pinv'),
         convex.noisy_adagrad(2, EYE, 'pinv'), dict(rate=0.01), 1e-5),
    Case('noisy_adagrad-diagonal', lambda: rules.noisy_adagrad(
        2, diagonal=True, epsilon=0.1, box=BOX),
         convex.noisy_adagrad_diagonal(2, 0.1, project=into_box), dict(adjacency='replace')),
    Case('noisy_adagrad-diagonal_basis', lambda: rules.noisy_adagrad(
        2, basis=BASIS, diagonal=True, epsilon=0.1, radius=0.6),
         convex.noisy_adagrad_diagonal(2, 0.1, BASIS, into_ball)),
    Case('non_private_noiseless_adam', lambda: rules.non_private_noiseless_adam(
        0.8, 0.9, 1e-3, allow_non_private=True), moments.noiseless(0.8, 0.9, 1e-3)),
    Case('non_private_noiseless_adam-scaled', lambda: rules.non_private_noiseless_adam(
        0.8, 0.9, 1e-3, scale_epsilon=0.2, allow_non_private=True),
         moments.noiseless(0.8, 0.9, 1e-3, 0.2), dict(clip=3.0)),
)
