export const nativeRoot: string;
export const COMMON_FLAGS: readonly string[];
export const LINK: readonly string[];
export function sourcesIn(folder: string): string[];
export function run(
  command: readonly string[],
  options?: { env?: NodeJS.ProcessEnv },
): Promise<void>;
