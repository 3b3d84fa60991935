type Fields = Readonly<Record<string, unknown>>;

const MAX_PORT = 65_535;

/**
 * What a decode worker of vLLM (0.32, 0.33) needs of `kv_transfer_params` and takes as it comes: a field that is missing or of another
 * type stops its engine, or has it read other memory. Undefined where all is there, else what is wrong, the value included. Fields that
 * are not named here are passed on.
 */
export function whyUnusable(params: Fields): string | undefined {
  const { transfer_mode: mode } = params;
  const push = mode === "push";
  if (mode != null && mode !== "pull" && !push)
    return wrong("transfer_mode", mode, 'is neither "pull" nor "push"');
  for (const name of ["remote_engine_id", "remote_request_id", "remote_host"]) {
    const value = params[name];
    if (typeof value !== "string" || value === "") return wrong(name, value, "is no text");
  }
  const { remote_port: port, remote_block_ids: blocks } = params;
  if (!isWhole(port, 1) || port > MAX_PORT) return wrong("remote_port", port, "is no port");
  // Of a worker that pushes the decode worker needs the size; of one that it reads from it takes 1 where none is given.
  for (const name of ["tp_size", "dcp_size", "pp_size"]) {
    const value = params[name];
    const needed = push && name === "tp_size";
    if (value === undefined ? needed : !isWhole(value, 1)) return wrong(name, value, "is no size");
  }
  const { remote_num_tokens: tokens } = params;
  if (tokens != null && !isWhole(tokens, 0)) return wrong("remote_num_tokens", tokens, "is no count");
  // A worker that pushes knows its blocks itself.
  return push ? undefined : whyNoBlocks(blocks);
}

function whyNoBlocks(blocks: unknown): string | undefined {
  const name = "remote_block_ids";
  if (!Array.isArray(blocks)) return wrong(name, blocks, "is no list");
  let count = 0;
  for (const group of blocks as unknown[]) {
    if (!Array.isArray(group)) return wrong(name, blocks, "is no list of one list for each KV cache group");
    for (const id of group as unknown[])
      if (!isWhole(id, 0)) return wrong(name, id, "holds what is no block id");
    count += group.length;
  }
  return count === 0 ? wrong(name, blocks, "names no block") : undefined;
}

function isWhole(value: unknown, least: number): value is number {
  return Number.isSafeInteger(value) && (value as number) >= least;
}

function wrong(name: string, value: unknown, what: string): string {
  const text = JSON.stringify(value) ?? "missing";
  return `${name} ${what} (${text.length > 80 ? `${text.slice(0, 80)}…` : text})`;
}
