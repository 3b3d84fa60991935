import { linesOf, type ModelLine } from "./vector-file.js";

/** Where a multimodal config keeps its language model's fields. */
const TEXT_FIELDS = ["text_config", "llm_config", "language_config", "thinker_config"];

export type Fields = Readonly<Record<string, unknown>>;

/** What `cache_cases.py` says of a release of vLLM. */
export interface Facts {
  readonly release: string;
  /** Kind, and vLLM's class. */
  readonly architectures: Readonly<Record<string, readonly [kind: string, className: string]>>;
  readonly servedUntil: Fields;
  readonly others: readonly string[];
  readonly quantizations: readonly string[];
  readonly shapes: Fields;
}

/** The configuration of an architecture whose fields are changed, or why vLLM builds none. */
export interface Base {
  readonly meta: string;
  readonly kind: string;
  readonly error?: string;
  /** The line of vLLM's source that raised the error. */
  readonly at?: string;
  readonly added: readonly string[];
  /** Fields that vLLM read. */
  readonly read?: readonly string[];
  readonly base: Fields;
}

export interface ChangedCase {
  readonly line: ModelLine;
  readonly changed: Fields;
  readonly config: Fields;
}

/** Files of `cache_cases.py`, the one with the bases first. */
export function readCases(...files: readonly string[]): {
  readonly facts: Facts;
  readonly bases: ReadonlyMap<string, Base>;
  readonly cases: readonly ChangedCase[];
} {
  const bases = new Map<string, Base>();
  const cases = files.flatMap(linesOf).flatMap((text): ChangedCase[] => {
    if (text === "") return [];
    const line = JSON.parse(text) as ModelLine & Base & { readonly changed?: Fields };
    if (line.meta !== undefined) {
      bases.set(line.meta, line);
      return [];
    }
    const { changed = {} } = line;
    return [{ line, changed, config: changedConfig(bases.get(line.config)?.base ?? {}, changed) }];
  });
  const facts = bases.get("") as unknown as Facts;
  bases.delete("");
  return { facts, bases, cases };
}

/** Changes as `cache_cases.py` writes them: null takes a field out, "=null" writes a null. */
export function changedConfig(config: Fields, change: Fields): Fields {
  const inner = TEXT_FIELDS.find((field) => isFields(config[field]));
  if (inner !== undefined)
    return { ...config, [inner]: changedConfig(config[inner] as Fields, change) };
  const changed: Record<string, unknown> = { ...config };
  for (const [field, value] of Object.entries(change)) {
    if (value === null) delete changed[field];
    else changed[field] = value === "=null" ? null : value;
  }
  return changed;
}

/** The part with the language model's fields. */
export function textOf(config: Fields): Fields {
  const inner = TEXT_FIELDS.find((field) => isFields(config[field]));
  return inner === undefined ? config : textOf(config[inner] as Fields);
}

function isFields(value: unknown): value is Fields {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
