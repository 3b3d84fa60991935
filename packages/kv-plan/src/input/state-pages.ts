import { KvError } from "@kv/interface";
import type { StateSpaceGeometry } from "@kv/plan";
import type { LayerShape, StateShape } from "./model-shape.js";

/** The default number of tokens in a kernel block of a hybrid. */
export const KERNEL_TOKENS = 16;

/** A rank's share of a state. Errors: `KV_PLAN_UNSUPPORTED` where ranks would hold replicas of a group of projections. */
export function stateOfRank(state: StateShape, tpSize: number): StateSpaceGeometry {
  if (state.groups % tpSize !== 0) {
    throw new KvError(
      "KV_PLAN_UNSUPPORTED",
      `the ${state.groups} groups of a state-space layer's projections do not divide over TP size ${tpSize}`,
      { details: { groups: state.groups, tpSize } },
    );
  }
  const convProjectionBytes = state.projectionBytes.map((bytes) => bytes / tpSize);
  return {
    convProjectionBytes,
    convBytes: convProjectionBytes.reduce((sum, bytes) => sum + bytes, 0),
    recurrentBytes: state.recurrentBytes / tpSize,
  };
}

/** Bytes of one token of a layer on a rank. Heads that do not divide over ranks are rounded up; the planner refuses such a pair. */
export function tokenBytes({ kind, numKvHeads, bytesPerHeadAndToken }: LayerShape, tpSize: number): number {
  const heads = kind === "full" || kind === "swa" ? Math.ceil(numKvHeads / tpSize) : 1;
  return heads * bytesPerHeadAndToken;
}

/**
 * Tokens in a logical block of a hybrid: the fewest kernel blocks whose page holds a state, since states live in the pages of attention (vLLM 0.33:
 * `HybridAttentionMambaModelConfig`). Undefined for models without states.
 */
export function hybridBlockTokens(
  layers: readonly LayerShape[],
  tpSize: number,
  kernelTokens: number,
): number | undefined {
  const state = layers.find((layer) => layer.state !== undefined)?.state;
  const attention = layers.find((layer) => layer.state === undefined);
  if (state === undefined || attention === undefined) return undefined;
  const { convBytes, recurrentBytes } = stateOfRank(state, tpSize);
  const kernelBytes = kernelTokens * tokenBytes(attention, tpSize);
  return kernelTokens * Math.ceil((convBytes + recurrentBytes) / kernelBytes);
}

/** The fields of a config that describe a Mamba 2 layer, with Nemotron's names. */
export interface StateConfig {
  readonly mamba_num_heads?: number | null | undefined;
  readonly mamba_head_dim?: number | null | undefined;
  readonly ssm_state_size?: number | null | undefined;
  readonly n_groups?: number | null | undefined;
  readonly conv_kernel?: number | null | undefined;
}

/** The state of a Mamba 2 layer; undefined where a field is missing. The elements of the recurrent state have a size of their own. */
export function mamba2State(
  config: StateConfig,
  bytes: { readonly conv: number; readonly recurrent: number },
): StateShape | undefined {
  const { mamba_num_heads: heads, mamba_head_dim: headSize, ssm_state_size: stateSize } = config;
  const { n_groups: groups, conv_kernel: kernel } = config;
  if (heads == null || headSize == null || stateSize == null || groups == null || kernel == null)
    return undefined;
  const columns = (kernel - 1) * bytes.conv;
  const projection = groups * stateSize * columns;
  return {
    projectionBytes: [heads * headSize * columns, projection, projection],
    recurrentBytes: heads * headSize * stateSize * bytes.recurrent,
    groups,
  };
}
