import type { StateShape } from "./model-shape.js";

/** What a config says of a Mamba 2 layer, in the names of Nemotron's. */
export interface StateConfig {
  readonly mamba_num_heads?: number | null | undefined;
  readonly mamba_head_dim?: number | null | undefined;
  readonly ssm_state_size?: number | null | undefined;
  readonly n_groups?: number | null | undefined;
  readonly conv_kernel?: number | null | undefined;
}

/** Undefined where the config does not say all of it. The recurrent state's elements are of their own size. */
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
