#!/usr/bin/env bash
# scripts/release.sh VERSION: check, build in dist/, test the wheel, tag. Nothing is uploaded or pushed; what is left for
# people is printed at the end. The version is the one in src/headrace/__init__.py.
set -euo pipefail
cd "$(dirname "$0")/.."
fail() { echo "release: $*" >&2; exit 2; }

[ $# = 1 ] || fail "usage: scripts/release.sh VERSION"
version=$1 tag=v$1
written=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' src/headrace/__init__.py)
[ "$version" = "$written" ] || fail "VERSION = $version: src/headrace/__init__.py has $written. Change one of them."
heading=$(grep "^## $version\b" CHANGELOG.md) || fail "CHANGELOG.md: no section '## $version'. Write it."
[[ $heading != *"not released"* ]] || fail "CHANGELOG.md: $heading. Write the date of the release there."
[ -z "$(git status --porcelain)" ] || fail "the checkout has changes that are not committed. Commit them."
! git rev-parse -q --verify "refs/tags/$tag" >/dev/null || fail "tag = $tag: exists. Raise the version."
git var GIT_COMMITTER_IDENT >/dev/null || fail "user.name, user.email: git needs both for a tag. Set them by git config."

# Built twice from what git has, so that neither this folder nor the time of day is in the files.
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for build in first second; do
  mkdir "$scratch/$build"
  git archive HEAD | tar -x -C "$scratch/$build"
  (cd "$scratch/$build" && "$OLDPWD/.venv/bin/python" -m hatchling build -d dist)
done
cmp "$scratch"/{first,second}/dist/headrace-"$version"-py3-none-any.whl
cmp "$scratch"/{first,second}/dist/headrace-"$version".tar.gz
make lint test-wheel
rm -rf dist && cp -r "$scratch/first/dist" dist
git tag -a "$tag" -m "Headrace $version"

cat <<END

$tag is tagged here, and dist/ has:
$(cd dist && sha256sum headrace-*)

Sign-off, each by name:
  [ ] .ci/run passed at this commit on x86_64 and on aarch64
  [ ] make test-full passed, and make test-faults ran for a night
  [ ] the tests in tests/gpu passed on a GPU, with the versions of headrace --version
  [ ] the runs in tests/data resume; the examples that the changelog names were run
  [ ] CHANGELOG.md names every change that a user has to act on
Then: git push origin $tag, upload dist/, and raise __version__ for the next one.
To take it back: git tag -d $tag
END
