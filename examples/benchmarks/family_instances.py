"""Small instances of libraries whose models are not made alike, written out one by one, for `family_models.py`.

    INSTANCES[library][family](module)      the model with the arguments of its forward, given the imported module

Of torch_geometric, whose layers are made alike, arguments follow from the names of parameters (`GRAPH_ARGUMENTS`).
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["INSTANCES", "VIT", "Call", "graph_layer", "graph_layers"]

BATCH = 4
Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _call(model: nn.Module, *args: Any, **kwargs: Any) -> Call:
    return model, args, kwargs


def _real(*size: int) -> Tensor:
    return torch.randn(BATCH, *size)


def _tokens(length: int = 16, most: int = 64) -> Tensor:
    return torch.randint(1, most, (BATCH, length))


def _steps() -> Tensor:
    return torch.randint(1, 900, (BATCH,))


UNET = {"spatial_dims": 2, "channels": (16, 32), "attention_levels": (False, True), "num_res_blocks": 1,
        "norm_num_groups": 8}
MONAI: dict[str, Callable[[Any], Call]] = {
    "ahnet": lambda n: _call(n.AHNet(spatial_dims=2, upsample_mode="bilinear"), _real(1, 64, 64)),
    "attentionunet": lambda n: _call(n.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)), _real(1, 32, 32)),
    "autoencoder": lambda n: _call(n.AutoEncoder(2, 1, 1, (8, 16), (2, 2)), _real(1, 32, 32)),
    "autoencoderkl": lambda n: _call(n.AutoencoderKL(**UNET), _real(1, 32, 32)),
    "basic_unet": lambda n: _call(n.BasicUNet(2, 1, 2, (8, 8, 16, 16, 32, 8)), _real(1, 32, 32)),
    "basic_unetplusplus": lambda n: _call(n.BasicUNetPlusPlus(2, 1, 2, (8, 8, 16, 16, 32, 8)), _real(1, 32, 32)),
    "classifier": lambda n: _call(n.Discriminator((1, 32, 32), (8, 16), (2, 2)), _real(1, 32, 32)),
    "controlnet": lambda n: _call(n.ControlNet(in_channels=1, **UNET), _real(1, 32, 32), _steps(), _real(1, 64, 64)),
    "daf3d": lambda n: _call(n.DAF3D(1, 2), _real(1, 32, 32, 32)),
    "densenet": lambda n: _call(n.DenseNet(2, 1, 2, 8, 8, (2, 2, 2)), _real(1, 64, 64)),
    "diffusion_model_unet": lambda n: _call(n.DiffusionModelUNet(in_channels=1, out_channels=1, **UNET),
                                            _real(1, 32, 32), _steps()),
    "dynunet": lambda n: _call(n.DynUNet(2, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2)), _real(1, 32, 32)),
    "efficientnet": lambda n: _call(n.EfficientNetBN("efficientnet-b0", pretrained=False), _real(3, 64, 64)),
    "flexible_unet": lambda n: _call(n.FlexibleUNet(3, 2, "efficientnet-b0"), _real(3, 64, 64)),
    "fullyconnectednet": lambda n: _call(n.VarFullyConnectedNet(16, 16, 8, (32,), (32,)), _real(16)),
    "generator": lambda n: _call(n.Generator(16, (8, 4, 4), (8, 1), (2, 2)), _real(16)),
    "highresnet": lambda n: _call(n.HighResNet(2), _real(1, 32, 32)),
    "hovernet": lambda n: _call(n.HoVerNet(), _real(3, 256, 256)),
    "masked_autoencoder_vit": lambda n: _call(n.MaskedAutoEncoderViT(
        1, (32, 32), (8, 8), 64, 128, 2, 4, decoder_hidden_size=64, decoder_mlp_dim=128, decoder_num_layers=1,
        decoder_num_heads=4, spatial_dims=2), _real(1, 32, 32)),
    "mednext": lambda n: _call(n.MedNeXt(2, 8, kernel_size=3), _real(1, 32, 32)),
    "milmodel": lambda n: _call(n.MILModel(2, "att_trans", False), _real(3, 3, 32, 32)),
    "patchgan_discriminator": lambda n: _call(n.PatchDiscriminator(2, 8, 1), _real(1, 64, 64)),
    "quicknat": lambda n: _call(n.Quicknat(4, 1, 8), _real(1, 32, 32)),
    "regressor": lambda n: _call(n.Regressor((1, 32, 32), (2,), (8, 16), (2, 2)), _real(1, 32, 32)),
    "regunet": lambda n: _call(n.RegUNet(2, 1, 8, 2), _real(1, 32, 32)),
    "resnet": lambda n: _call(n.ResNet("basic", [1, 1, 1, 1], [8, 16, 32, 64], spatial_dims=2, n_input_channels=1),
                              _real(1, 64, 64)),
    "restormer": lambda n: _call(n.Restormer(2, 1, 1, 16), _real(1, 32, 32)),
    "segresnet": lambda n: _call(n.SegResNet(2), _real(1, 32, 32)),
    "segresnet_vae": lambda n: _call(n.SegResNetVAE((32, 32), spatial_dims=2), _real(1, 32, 32)),
    "segresnet_ds": lambda n: _call(n.SegResNetDS(2, 8), _real(1, 32, 32)),
    "senet": lambda n: _call(n.SEResNet50(layers=(1, 1, 1, 1), spatial_dims=2, in_channels=1, num_classes=2),
                             _real(1, 64, 64)),
    "spade_network": lambda n: _call(n.SPADENet(2, 1, 1, 3, (32, 32), (8, 16), 8), _real(3, 32, 32), _real(1, 32, 32)),
    "spade_autoencoderkl": lambda n: _call(n.SPADEAutoencoderKL(label_nc=3, **UNET), _real(1, 32, 32),
                                           _real(3, 32, 32)),
    "swin_unetr": lambda n: _call(n.SwinUNETR(1, 2, depths=(1, 1, 1, 1), feature_size=12, spatial_dims=2),
                                  _real(1, 64, 64)),
    "transformer": lambda n: _call(n.DecoderOnlyTransformer(64, 32, 64, 2, 4), _tokens()),
    "unet": lambda n: _call(n.UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=1), _real(1, 32, 32)),
    "unetr": lambda n: _call(n.UNETR(1, 2, (32, 32), 8, 64, 128, 4, spatial_dims=2), _real(1, 32, 32)),
    "varautoencoder": lambda n: _call(n.VarAutoEncoder(2, (1, 32, 32), 1, 8, (8, 16), (2, 2)), _real(1, 32, 32)),
    "vista3d": lambda n: _call(n.vista3d.VISTA3D(n.SegResNetDS2(3, 8, blocks_down=(1, 1), dsdepth=1),
                                                 n.vista3d.ClassMappingClassify(4, 8), None), _real(1, 16, 16, 16),
                               class_vector=torch.tensor([[1]])),
    "vit": lambda n: _call(n.ViT(1, (32, 32), (8, 8), 64, 128, 2, 4, spatial_dims=2), _real(1, 32, 32)),
    "vitautoenc": lambda n: _call(n.ViTAutoEnc(1, (32, 32), (8, 8), hidden_size=64, mlp_dim=128, num_layers=2,
                                               num_heads=4, spatial_dims=2), _real(1, 32, 32)),
    "vnet": lambda n: _call(n.VNet(2, dropout_prob_up=(0.1, 0.1)), _real(1, 32, 32)),
    "voxelmorph": lambda n: _call(n.VoxelMorphUNet(2, 2, 16, (16, 32, 32, 32, 32, 32), (16, 16)), _real(2, 32, 32)),
    "vqvae": lambda n: _call(n.VQVAE(2, 1, 1, (16, 32), 1, (16, 32), ((2, 4, 1, 1), (2, 4, 1, 1)),
                                     ((2, 4, 1, 1, 0), (2, 4, 1, 1, 0))), _real(1, 32, 32)),
}

HEADS = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 2}
BLOCKS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
AXES = {"axes_dims_rope": (4, 6, 6), "num_single_layers": 1, "joint_attention_dim": 32, "in_channels": 16}


def _flux(model: nn.Module, **more: Any) -> Call:
    """Packed latents, text, and the positions of both."""
    return _call(model, hidden_states=_real(16, 16), encoder_hidden_states=_real(8, 32), timestep=_steps() / 1000.0,
                 img_ids=torch.randn(16, 3), txt_ids=torch.zeros(8, 3), **more)


def _video(model: nn.Module, channels: int, text: int, **more: Any) -> Call:
    return _call(model, hidden_states=_real(channels, 2, 8, 8), encoder_hidden_states=_real(8, text), timestep=_steps(),
                 **more)


def _image(model: nn.Module, channels: int, text: int, **more: Any) -> Call:
    return _call(model, hidden_states=_real(channels, 8, 8), encoder_hidden_states=_real(8, text), timestep=_steps(),
                 **more)


DIFFUSERS: dict[str, Callable[[Any], Call]] = {
    "auraflow": lambda n: _image(n.AuraFlowTransformer2DModel(
        8, 2, 4, 1, 2, 16, 4, 32, 64, 4, 64), 4, 32),
    "bria": lambda n: _flux(n.BriaTransformer2DModel(1, num_attention_heads=4, attention_head_dim=16, num_layers=1,
                                                     **AXES)),
    "chroma": lambda n: _flux(n.ChromaTransformer2DModel(
        1, num_attention_heads=4, attention_head_dim=16, num_layers=1, approximator_num_channels=16,
        approximator_hidden_dim=32, approximator_layers=1, **AXES)),
    "cogvideox": lambda n: _call(n.CogVideoXTransformer3DModel(
        in_channels=4, out_channels=4, time_embed_dim=16, text_embed_dim=32, sample_width=8, sample_height=8,
        sample_frames=8, max_text_seq_length=8, **HEADS), _real(2, 4, 8, 8), _real(8, 32), _steps()),
    "cogview3": lambda n: _image(n.CogView3PlusTransformer2DModel(
        2, 4, 2, 16, 4, 4, 32, 16, 8, 64, 8), 4, 32, original_size=_real(2), target_size=_real(2),
        crop_coords=_real(2)),
    "cogview4": lambda n: _image(n.CogView4Transformer2DModel(
        2, 4, 4, 2, 16, 4, 32, 16, 8, 64, 8, (8, 8)), 4, 32, original_size=_real(2), target_size=_real(2),
        crop_coords=_real(2)),
    "cosmos": lambda n: _video(n.CosmosTransformer3DModel(
        4, 4, 4, 16, 2, text_embed_dim=32, adaln_lora_dim=8, max_size=(4, 16, 16), concat_padding_mask=False), 4, 32),
    "dit": lambda n: _call(n.DiTTransformer2DModel(sample_size=8, **HEADS), _real(4, 8, 8), timestep=_steps(),
                           class_labels=_steps()),
    "flux": lambda n: _flux(n.FluxTransformer2DModel(1, num_attention_heads=4, attention_head_dim=16, num_layers=1,
                                                     pooled_projection_dim=32, **AXES), pooled_projections=_real(32)),
    "hunyuan_dit": lambda n: _call(n.HunyuanDiT2DModel(
        4, 16, 4, 2, sample_size=8, hidden_size=64, num_layers=2, cross_attention_dim=32, cross_attention_dim_t5=32,
        pooled_projection_dim=16, text_len=8, text_len_t5=8, use_style_cond_and_image_meta_size=False),
        _real(4, 8, 8), _steps(), _real(8, 32), torch.ones(BATCH, 8), _real(8, 32), torch.ones(BATCH, 8)),
    "latte": lambda n: _video(n.LatteTransformer3DModel(
        in_channels=4, sample_size=8, patch_size=2, cross_attention_dim=64, caption_channels=32, video_length=2,
        norm_type="ada_norm_single", num_embeds_ada_norm=1000, **HEADS), 4, 32),
    "ltx": lambda n: _call(n.LTXVideoTransformer3DModel(
        8, 8, 1, 1, 4, 16, 64, 2, caption_channels=32), _real(32, 8), _real(8, 32), _steps(), torch.ones(BATCH, 8),
        num_frames=2, height=4, width=4),
    "lumina2": lambda n: _image(n.Lumina2Transformer2DModel(
        8, 2, 4, None, 64, 2, 1, 4, 2, 32, axes_dim_rope=(4, 6, 6), axes_lens=(32, 16, 16), cap_feat_dim=32), 4, 32,
        encoder_attention_mask=torch.ones(BATCH, 8, dtype=torch.bool)),
    "mochi": lambda n: _video(n.MochiTransformer3DModel(
        2, 4, 16, 2, 32, 4, text_embed_dim=32, time_embed_dim=16), 4, 32,
        encoder_attention_mask=torch.ones(BATCH, 8, dtype=torch.bool)),
    "pixart": lambda n: _image(n.PixArtTransformer2DModel(
        sample_size=8, caption_channels=32, cross_attention_dim=64, **HEADS), 4, 32),
    "prior": lambda n: _call(n.PriorTransformer(4, 16, 2, 32, 8), _real(32), _steps(), _real(32), _real(8, 32)),
    "prx": lambda n: _image(n.PRXTransformer2DModel(4, 2, 32, 64, 2.0, 4, 2, [8, 8]), 4, 32),
    "qwenimage": lambda n: _call(n.QwenImageTransformer2DModel(
        2, 16, 4, 2, 16, 4, 32, axes_dims_rope=(4, 6, 6)), _real(16, 16), _real(8, 32),
        torch.ones(BATCH, 8, dtype=torch.bool), _steps() / 1000.0, [[(1, 4, 4)]] * BATCH),
    "sana": lambda n: _image(n.SanaTransformer2DModel(
        4, 4, 4, 16, 2, 4, 16, 64, 32, sample_size=8), 4, 32),
    "sd3": lambda n: _image(n.SD3Transformer2DModel(
        8, 2, 4, 2, 16, 4, 32, 64, 32, 4, 8), 4, 32, pooled_projections=_real(32)),
    "stable_audio": lambda n: _call(n.StableAudioDiTModel(
        32, 8, 2, 16, 4, 2, 8, 64, 16, 32, 32), _real(8, 32), _steps() / 1000.0, _real(8, 32), _real(1, 32)),
    "temporal": lambda n: _call(n.TransformerTemporalModel(4, 16, 32, num_layers=1), torch.randn(8, 32, 8, 8),
                                num_frames=2),
    "transformer_2d": lambda n: _call(n.Transformer2DModel(4, 16, 32, num_layers=2, norm_num_groups=8,
                                                           cross_attention_dim=32), _real(32, 8, 8), _real(8, 32)),
    "wan": lambda n: _video(n.WanTransformer3DModel(
        (1, 2, 2), 4, 16, 4, 4, 32, 16, 128, 2), 4, 32),
    "unet_1d": lambda n: _call(n.UNet1DModel(
        32, in_channels=4, out_channels=4, extra_in_channels=16, block_out_channels=(32, 32, 64)), _real(4, 32),
        _steps()),
    "unet_2d": lambda n: _call(n.UNet2DModel(
        16, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **BLOCKS), _real(3, 16, 16), _steps()),
    "unet_2d_condition": lambda n: _call(n.UNet2DConditionModel(
        16, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32, attention_head_dim=8,
        **BLOCKS), _real(4, 16, 16), _steps(), _real(8, 32)),
    "unet_3d_condition": lambda n: _call(n.UNet3DConditionModel(
        16, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=32, attention_head_dim=8,
        **BLOCKS), _real(4, 2, 16, 16), _steps(), _real(8, 32)),
    "unet_motion": lambda n: _call(n.UNetMotionModel(
        16, down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"), cross_attention_dim=32,
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"), num_attention_heads=4, motion_num_attention_heads=4,
        **BLOCKS), _real(4, 2, 16, 16), _steps(), _real(8, 32)),
    "uvit_2d": lambda n: _call(n.UVit2DModel(
        64, False, 0.0, 32, 16, 64, 32, block_out_channels=64, num_res_blocks=1, num_hidden_layers=2,
        num_attention_heads=4, codebook_size=32, sample_size=8), torch.randint(32, (BATCH, 8, 8)), _real(8, 32),
        _real(16), _real(5)),
    "autoencoder_kl": lambda n: _call(n.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **BLOCKS),
        _real(3, 32, 32)),
    "autoencoder_dc": lambda n: _call(n.AutoencoderDC(
        3, 4, 8, ("ResBlock", "EfficientViTBlock"), ("ResBlock", "EfficientViTBlock"), (16, 32), (16, 32), (1, 1),
        (1, 1)), _real(3, 32, 32)),
    "autoencoder_tiny": lambda n: _call(n.AutoencoderTiny(
        encoder_block_out_channels=(16, 16), decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1)), _real(3, 32, 32)),
    "autoencoder_oobleck": lambda n: _call(n.AutoencoderOobleck(8, (2, 2), (1, 2), 8, 8, 2), _real(2, 64)),
    "vq_model": lambda n: _call(n.VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=32,
        **BLOCKS), _real(3, 32, 32)),
    "controlnet": lambda n: _call(n.ControlNetModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=32, attention_head_dim=8,
        conditioning_embedding_out_channels=(16, 16), **BLOCKS), _real(4, 16, 16), _steps(), _real(8, 32),
        controlnet_cond=_real(3, 32, 32)),
}

TABLE = {"num_tokens": 64, "dim": 64, "depth": 2, "heads": 4}
PACKAGES: dict[str, Callable[[Any], Call]] = {
    "performer_pytorch": lambda n: _call(n.PerformerLM(max_seq_len=32, dim_head=16, **TABLE), _tokens()),
    "linformer": lambda n: _call(n.LinformerLM(seq_len=16, k=8, dim_head=16, **TABLE), _tokens()),
    "conformer": lambda n: _call(n.Conformer(64, depth=2, dim_head=16, heads=4, conv_kernel_size=7), _real(16, 64)),
    "perceiver_pytorch": lambda n: _call(n.Perceiver(
        num_freq_bands=4, depth=2, max_freq=8.0, input_channels=3, num_latents=8, latent_dim=64, num_classes=10,
        cross_dim_head=16, latent_heads=4, latent_dim_head=16), _real(16, 16, 3)),
    "reformer_pytorch": lambda n: _call(n.ReformerLM(
        max_seq_len=32, bucket_size=8, causal=True, **TABLE), _tokens(32)),
    "local_attention": lambda n: _call(n.LocalTransformer(
        max_seq_len=64, local_attn_window_size=8, dim_head=16, causal=True, **TABLE), _tokens(32)),
    "product_key_memory": lambda n: _call(n.PKM(64, heads=2, num_keys=16, topk=4), _real(16, 64)),
    "mlp_mixer_pytorch": lambda n: _call(n.MLPMixer(
        image_size=32, channels=3, patch_size=8, dim=64, depth=2, num_classes=10), _real(3, 32, 32)),
    "g_mlp_pytorch": lambda n: _call(n.gMLP(num_tokens=64, dim=64, depth=2, seq_len=16), _tokens()),
    "res_mlp_pytorch": lambda n: _call(n.ResMLP(image_size=32, patch_size=8, dim=64, depth=2, num_classes=10),
                                       _real(3, 32, 32)),
    "axial_attention": lambda n: _call(n.AxialImageTransformer(dim=32, depth=2, heads=4, axial_pos_emb_shape=(8, 8)),
                                       _real(32, 8, 8)),
    "slot_attention": lambda n: _call(n.SlotAttention(num_slots=4, dim=64), _real(16, 64)),
    "tab_transformer_pytorch": lambda n: _call(n.FTTransformer(
        categories=(5, 7, 3), num_continuous=4, dim=32, depth=2, heads=4, dim_head=8),
        torch.randint(3, (BATCH, 3)), _real(4)),
    "egnn_pytorch": lambda n: _call(n.EGNN_Network(num_tokens=64, num_positions=32, dim=32, depth=2), _tokens(),
                                    _real(16, 3)),
    "nystrom_attention": lambda n: _call(n.Nystromformer(dim=64, depth=2, heads=4, dim_head=16, num_landmarks=8),
                                         _real(16, 64)),
    "h_transformer_1d": lambda n: _call(n.HTransformer1D(
        max_seq_len=32, causal=True, block_size=8, dim_head=16, **TABLE), _tokens(32)),
    "hourglass_transformer_pytorch": lambda n: _call(n.HourglassTransformerLM(
        num_tokens=64, dim=64, max_seq_len=32, shorten_factor=2, depth=(1, 1, 1), heads=4, dim_head=16), _tokens(32)),
    "bottleneck_transformer_pytorch": lambda n: _call(n.BottleStack(
        dim=32, fmap_size=16, dim_out=64, num_layers=2, heads=4, dim_head=16), _real(32, 16, 16)),
    "point_transformer_pytorch": lambda n: _call(n.PointTransformerLayer(dim=32, num_neighbors=4), _real(16, 32),
                                                 _real(16, 3)),
    "timesformer_pytorch": lambda n: _call(n.TimeSformer(
        dim=64, image_size=32, patch_size=8, num_frames=4, num_classes=10, depth=2, heads=4, dim_head=16),
        _real(4, 3, 32, 32)),
    "vector_quantize_pytorch": lambda n: _call(n.VectorQuantize(dim=32, codebook_size=64), _real(16, 32)),
    "vector_quantize_pytorch lfq": lambda n: _call(n.LFQ(dim=8, codebook_size=256), _real(16, 8)),
    "vector_quantize_pytorch fsq": lambda n: _call(n.FSQ(levels=[8, 5, 5], dim=32), _real(16, 32)),
    "denoising_diffusion_pytorch": lambda n: _call(n.Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8), _real(3, 32, 32),
                                                   _steps()),
    "denoising_diffusion_pytorch loss": lambda n: _call(n.GaussianDiffusion(
        n.Unet(dim=16, dim_mults=(1, 2), attn_dim_head=8), image_size=32, timesteps=100), _real(3, 32, 32)),
    "coca_pytorch": lambda n: _call(n.CoCa(
        dim=64, img_encoder=nn.Linear(32, 64), image_dim=64, num_tokens=64, unimodal_depth=1, multimodal_depth=1,
        dim_head=16, heads=4), _tokens(), image_tokens=_real(9, 64)),
    "megabyte_pytorch": lambda n: _call(n.MEGABYTE(
        num_tokens=64, dim=(64, 32), max_seq_len=(8, 4), depth=(1, 1), dim_head=16, heads=4), _tokens(32)),
    "soft_moe_pytorch": lambda n: _call(n.SoftMoE(dim=64, seq_len=16, num_experts=4), _real(16, 64)),
    "mixture_of_experts": lambda n: _call(n.MoE(dim=64, num_experts=4), _real(16, 64)),
    "iTransformer": lambda n: _call(n.iTransformer(
        num_variates=8, lookback_len=16, dim=64, depth=2, heads=4, dim_head=16, pred_length=4), _real(16, 8)),
    "mega_pytorch": lambda n: _call(n.Mega(num_tokens=64, dim=64, depth=2, ema_heads=4), _tokens()),
    "linear_attention_transformer": lambda n: _call(n.LinearAttentionTransformerLM(
        max_seq_len=32, causal=False, **TABLE), _tokens(32)),
    "neuralop": lambda n: _call(importlib.import_module("neuralop.models").FNO(
        n_modes=(8, 8), hidden_channels=16, in_channels=1, out_channels=1, n_layers=2), _real(1, 16, 16)),
    "neuralop uno": lambda n: _call(importlib.import_module("neuralop.models").UNO(
        1, 1, 16, uno_out_channels=[16, 16, 16], uno_n_modes=[[4, 4]] * 3, uno_scalings=[[1, 1]] * 3),
        _real(1, 16, 16)),
    "efficientnet_pytorch": lambda n: _call(n.EfficientNet.from_name("efficientnet-b0"), _real(3, 64, 64)),
    "open_clip": lambda n: _call(n.model.CLIP(
        64, {"layers": 2, "width": 64, "head_width": 16, "patch_size": 8, "image_size": 32},
        {"context_length": 16, "vocab_size": 64, "width": 64, "heads": 4, "layers": 2}), _real(3, 32, 32), _tokens()),
    "pytorch_tabnet": lambda n: _call(importlib.import_module("pytorch_tabnet.tab_network").TabNet(
        16, 4, group_attention_matrix=torch.eye(16), virtual_batch_size=BATCH), _real(16)),
}


STAGES = {"dim": 32, "depth": (1, 1), "num_classes": 10}
FLAT = {"patch_size": 16, "num_classes": 10, "dim": 64, "mlp_dim": 64}
VIT: dict[str, tuple[dict[str, Any], int]] = {
    "max_vit": ({**STAGES, "window_size": 4}, 64), "max_vit_with_registers": ({**STAGES, "window_size": 4}, 64),
    "cross_vit": ({"image_size": 48, "num_classes": 10, "sm_dim": 32, "lg_dim": 64, "depth": 1, "lg_enc_depth": 1}, 48),
    "mobile_vit": ({"image_size": (64, 64), "dims": [32, 48, 64], "num_classes": 10,
                    "channels": [16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 128]}, 64),
    "pit": ({**FLAT, "image_size": 64, "depth": (1, 1), "heads": 4}, 64),
    "scalable_vit": ({**STAGES, "heads": (2, 2), "reduction_factor": (4, 2)}, 64),
    "sep_vit": ({**STAGES, "heads": (2, 2)}, 112),
    "cct": ({"img_size": 64, "embedding_dim": 64, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2}, 64),
    "crossformer": ({"depth": (1, 1, 1, 1)}, 224), "regionvit": ({"depth": (1, 1, 1, 1)}, 224),
}
"""Arguments of classes of vit_pytorch that those by their names do not fit, and the side of an image."""

INSTANCES = {"monai": MONAI, "diffusers": DIFFUSERS, "packages": PACKAGES}
"""Instances by library; those of `packages` are of as many small ones."""

NODES, EDGES, WIDTH = 16, 48, 16
GRAPH_ARGUMENTS = {"in_channels": WIDTH, "out_channels": WIDTH, "channels": WIDTH, "hidden_channels": WIDTH, "K": 2,
                   "alpha": 0.5, "num_layers": 2, "dim": 3, "kernel_size": 3, "num_relations": 3, "edge_dim": 3,
                   "filter_size": 2, "num_node_types": 2, "num_edge_types": 3, "edge_type_emb_dim": 4,
                   "edge_attr_emb_dim": 4, "aggregators": ["mean", "max"], "scalers": ["identity", "amplification"],
                   "first_aggr": True, "theta": 0.5, "layer": 1}


class GraphLayer(nn.Module):
    """A layer of torch_geometric on one graph, behind a linear one, so that it has a parameter and gradients."""

    def __init__(self, layer: nn.Module, graph: dict[str, Tensor]) -> None:
        super().__init__()
        self.first, self.layer, self.names = nn.Linear(WIDTH, WIDTH), layer, tuple(graph)
        for name, value in graph.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.first(x), **{name: getattr(self, name) for name in self.names})


def _perceptron(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(widths[0], widths[1]), nn.ReLU(), nn.Linear(widths[1], widths[1]))


def graph_layers() -> dict[str, str]:
    """The last layer of every file of torch_geometric."""
    library, found = importlib.import_module("torch_geometric.nn.conv"), {}
    for one in pkgutil.iter_modules(library.__path__):
        module = importlib.import_module(f"torch_geometric.nn.conv.{one.name}")
        classes = [name for name, value in vars(module).items() if inspect.isclass(value) and not name.startswith("_")
                   and issubclass(value, nn.Module) and value.__module__ == module.__name__]
        if classes:
            found[one.name] = classes[-1]
    return found


def graph_layer(name: str) -> Call:
    """A layer with its arguments by the names of parameters, on a graph of random edges."""
    library = importlib.import_module("torch_geometric.nn")
    kind = getattr(library, name, None) or getattr(library.conv, name)
    wanted = _required(kind)
    outer = WIDTH * WIDTH if name == "NNConv" else WIDTH
    layers = {"nn": _perceptron(2 * WIDTH if name == "EdgeConv" else 3 if name == "NNConv" else WIDTH, outer),
              "conv": library.GCNConv(WIDTH, WIDTH), "mlp_h": _perceptron(WIDTH, 3),
              "mlp_f": _perceptron(WIDTH + 3, WIDTH), "mlp_g": _perceptron(WIDTH, WIDTH),
              "deg": torch.tensor([1, 4, 6, 4, 1])}
    more = {"edge_dim": 3} if name == "GINEConv" else {}
    layer = kind(**{one: {**GRAPH_ARGUMENTS, **layers}[one] for one in wanted}, **more)
    edges = torch.randint(NODES, (2, EDGES))
    graph = {"edge_index": edges, "pos_edge_index": edges, "neg_edge_index": torch.randint(NODES, (2, EDGES)),
             "hyperedge_index": torch.stack([edges[0], edges[1] % 8]), "x_0": torch.randn(NODES, WIDTH),
             "pos": torch.randn(NODES, 3), "normal": torch.randn(NODES, 3), "node_type": torch.randint(2, (NODES,)),
             "edge_type": torch.randint(3, (EDGES,)), "edge_attr": torch.rand(EDGES, 3)}
    read = _required(kind.forward)[2:]
    if {"dim", "edge_dim", "nn"} & {*wanted, *more} and "edge_attr" in inspect.signature(kind.forward).parameters:
        read.append("edge_attr")
    if "num_relations" in wanted:
        read.append("edge_type")
    return _call(GraphLayer(layer, {one: graph[one] for one in dict.fromkeys(read)}), torch.randn(NODES, WIDTH))


def _required(function: Callable[..., Any]) -> list[str]:
    """Names of parameters without a default."""
    return [p.name for p in inspect.signature(function).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
