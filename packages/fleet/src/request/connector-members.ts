import { KvError } from "@kv/interface";

type Fields = Readonly<Record<string, unknown>>;

/**
 * Names that reach an engine's KV connector, its encoder, or another host through them: `kv_transfer_params` and `ec_transfer_params` (vLLM's request
 * classes, 0.31 to 0.33), `kv_hints` (its Rust front end), and what a later vLLM names in the same way.
 */
const CONNECTOR_MEMBER = /^(kv|ec)_|_transfer_params$/;

/**
 * Objects whose members vLLM reads those names from: `vllm_xargs` becomes `SamplingParams.extra_args`, which its token route takes in `sampling_params`. Its clients write
 * further members into `extra_body`.
 */
const BAGS: ReadonlySet<string> = new Set(["vllm_xargs", "extra_args", "extra_body", "sampling_params"]);

/** How a body was written, where it is passed on as it came. */
export interface WrittenBody {
  /** The body, or the part of it that has its short members. */
  readonly text: string;
  /** Top-level members that occur again outside of `text`. */
  readonly repeated?: ReadonlySet<string> | undefined;
}

/** Whether a member of this name reaches an engine's connector. */
function isConnectorMember(name: string): boolean {
  return CONNECTOR_MEMBER.test(name);
}

/**
 * Refuses what only the proxy may tell an engine. A client that could name hosts and blocks would read other requests' KV through a decode worker, and vLLM's engine ends when a
 * value is no object. `null` is nothing, as it is for vLLM. `written`: where the body is passed on as it came, none of these members may occur twice, as another
 * parser may take another one of them. Errors: `KV_REQUEST_INVALID`, with the member's name.
 */
export function refuseConnectorMembers(fields: Fields, written?: WrittenBody): void {
  for (const name in fields) {
    const isBag = BAGS.has(name);
    if (!isBag && !isConnectorMember(name)) continue;
    const value = fields[name];
    if (isBag) refuseInside(value, name);
    else if (value !== null) throw refusal(name);
    if (
      written?.repeated?.has(name) === true ||
      (written !== undefined && timesNamed(written.text, name) > 1)
    )
      throw new KvError("KV_REQUEST_INVALID", `${name} is given more than once`, {
        hint: `give ${name} once, or leave it out`,
        details: { param: name },
      });
  }
}

/** Refuses the names in a bag, with any value, and a bag inside of it. */
function refuseInside(bag: unknown, path: string): void {
  if (typeof bag !== "object" || bag === null) return;
  for (const name in bag) if (BAGS.has(name) || isConnectorMember(name)) throw refusal(`${path}.${name}`);
}

function refusal(path: string): KvError {
  const why =
    path === "kv_transfer_params"
      ? "the proxy sets it"
      : "it reaches the engine's connector, which the proxy controls";
  return new KvError("KV_REQUEST_INVALID", `a client must not set ${path}: ${why}`, {
    hint: `leave ${path} out of the body`,
    details: { param: path },
  });
}

/** A string of a JSON text, and the colon behind a key. */
const STRING = /"([^"\\]*(?:\\.[^"\\]*)*)"\s*(:?)/g;

/** How often a name is a key in a JSON text, at any depth; 1 at once where the text has it no second time. */
function timesNamed(text: string, name: string): number {
  if (text.indexOf(name) === text.lastIndexOf(name) && !text.includes("\\u")) return 1;
  let times = 0;
  for (const [, written = "", colon] of text.matchAll(STRING)) {
    if (colon === "") continue;
    const key = written.includes("\\") ? (JSON.parse(`"${written}"`) as string) : written;
    if (key === name) times += 1;
  }
  return times;
}
