export async function metadataChecker(_args: readonly string[]): Promise<never> {
  return new Promise(() => {});
}
