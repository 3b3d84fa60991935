/** Where a multimodal config keeps its language model's fields. */
const TEXT_FIELDS = ["text_config", "llm_config", "language_config", "thinker_config"];

type Fields = Readonly<Record<string, unknown>>;

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
