export function zig(): Promise<{
  readonly compiler: readonly string[];
  readonly env: NodeJS.ProcessEnv;
}>;
