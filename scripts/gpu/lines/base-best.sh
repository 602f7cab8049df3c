# shellcheck shell=bash disable=SC2154
# The best model of the line `learning` at BERT base's size: twelve layers instead of eight, with the feed-forward width
# that equalizes parameter counts.
[[ -e $out/learning/report.json ]] || fail 1 "$out/learning does not exist; run the line \`learning\` first"
best=$("$python" "$here/report.py" --best "$out/learning")
case $best in
  bert) model='bert=(sf)x12' ;;
  lazyformer) model='lazyformer=M2x6; ffn=3456' ;;
  conv) model='conv=(cf)x5 sf (cf)x6; ffn=3424' ;;
  modern) model='modern=(s[qk_norm] f[gate=gelu])x12; ffn=2048' ;;
  *) fail 1 "$out/learning has no accuracy on BLiMP; run the line \`learning\` again" ;;
esac
# shellcheck source=scripts/gpu/lines/base-size.sh
source "$here/lines/base-size.sh"
