export interface Platform {
  readonly name: string;
  readonly target: string;
  readonly folder: string;
}
export const GLIBC: string;
export const EXPORTS: readonly string[];
export const PLATFORMS: readonly Platform[];
export function addonOf(platform: Platform): string;
export function isCurrent(platform: Platform): boolean;
