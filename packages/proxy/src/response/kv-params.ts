type Fields = Readonly<Record<string, unknown>>;

const MAX_PORT = 65_535;

/**
 * Checks the `kv_transfer_params` of a prefill answer: the members that a vLLM decode worker (0.32, 0.33) needs and does not check itself. A
 * member that is missing or of another type would stop its engine, or make it read other memory. Returns the first problem with the value,
 * or undefined. Members that are not named here are passed on.
 */
export function kvParamsProblem(params: Fields): string | undefined {
  const { transfer_mode: mode } = params;
  const push = mode === "push";
  if (mode != null && mode !== "pull" && !push)
    return wrong("transfer_mode", mode, 'is neither "pull" nor "push"');
  for (const name of ["remote_engine_id", "remote_request_id", "remote_host"]) {
    const value = params[name];
    if (typeof value !== "string" || value === "") return wrong(name, value, "is not a non-empty string");
  }
  const { remote_port: port, remote_block_ids: blocks } = params;
  if (!isInteger(port, 1) || port > MAX_PORT) return wrong("remote_port", port, "is not a port");
  // A decode worker needs the size of a worker that pushes. For one that it reads from, it assumes 1 where none is given.
  for (const name of ["tp_size", "dcp_size", "pp_size"]) {
    const value = params[name];
    const needed = push && name === "tp_size";
    if (value === undefined ? needed : !isInteger(value, 1))
      return wrong(name, value, "is not a positive integer");
  }
  const { remote_num_tokens: tokens } = params;
  if (tokens != null && !isInteger(tokens, 0))
    return wrong("remote_num_tokens", tokens, "is not a token count");
  // A worker that pushes knows its blocks itself.
  return push ? undefined : blockIdsProblem(blocks);
}

function blockIdsProblem(blocks: unknown): string | undefined {
  const name = "remote_block_ids";
  if (!Array.isArray(blocks)) return wrong(name, blocks, "is not a list");
  let count = 0;
  for (const group of blocks as unknown[]) {
    if (!Array.isArray(group))
      return wrong(name, blocks, "is not a list with one list for each KV cache group");
    for (const id of group as unknown[])
      if (!isInteger(id, 0)) return wrong(name, id, "contains a value that is not a block id");
    count += group.length;
  }
  return count === 0 ? wrong(name, blocks, "contains no block id") : undefined;
}

function isInteger(value: unknown, minimum: number): value is number {
  return Number.isSafeInteger(value) && (value as number) >= minimum;
}

function wrong(name: string, value: unknown, what: string): string {
  const text = JSON.stringify(value) ?? "missing";
  return `${name} ${what} (${text.length > 80 ? `${text.slice(0, 80)}…` : text})`;
}
