export interface ElfNeeds {
  libraries: readonly string[];
  versions: readonly string[];
  imports: readonly string[];
  exports: readonly string[];
}
export function elfNeeds(file: string): ElfNeeds;
export function violations(
  needs: ElfNeeds,
  allowed: { glibc: string; exported: readonly string[] },
): string[];
