// Comments for the settings in declarations. The types of settings are inferred from zod schemas,
// whose descriptions and defaults are in schema/config.json; zod's types keep the comments of a
// schema's members, so editors show them at a use of the settings.

/**
 * The declarations `text` with a comment before each setting that `schema` describes, and the
 * mappings of its source map moved by as many lines.
 */
export function withSettingComments(text, mappings, schema) {
  const lines = [];
  const mapped = [];
  const sources = mappings.split(";");
  /** The names that lead to a line, by its depth. */
  let path = [];
  for (const [at, line] of text.split("\n").entries()) {
    const [, indent = "", name] = /^((?: {4})*)(\w+)\??: /.exec(line) ?? [];
    if (/^\S/.test(line)) path = [];
    if (name !== undefined && indent !== "") {
      path = [...path.slice(0, indent.length / 4 - 1), name];
      const comment = commentOf(path.reduce((outer, each) => outer?.properties?.[each], schema));
      if (comment !== undefined) {
        lines.push(`${indent}${comment}`);
        mapped.push("");
      }
    }
    lines.push(line);
    if (at < sources.length) mapped.push(sources[at]);
  }
  return { text: lines.join("\n"), mappings: mapped.join(";") };
}

function commentOf(setting) {
  if (setting?.description === undefined) return undefined;
  const { description, default: usual } = setting;
  const isValue = usual !== undefined && (typeof usual !== "object" || Array.isArray(usual));
  const tag = isValue ? ` @default ${JSON.stringify(usual)}` : "";
  return `/** ${description.replaceAll("*/", "*\\/")}${tag} */`;
}
