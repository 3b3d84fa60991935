/** The declarations `text` with a comment before each setting that the JSON schema describes, and the mappings of its source map moved by as many lines. */
export function withSettingComments(
  text: string,
  mappings: string,
  schema: object,
): { readonly text: string; readonly mappings: string };
